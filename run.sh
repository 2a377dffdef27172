cd /tmp/w/snap
export PYTHONPATH=/tmp/w/snap/core:/tmp/w/snap/plugins:/tmp/w/snap/pipelines OMP_WAIT_POLICY=PASSIVE
nice -n 3 .venv/bin/python -m pytest -q -n 2 -m 'not slow and not mlflow and not prefect' --durations=60 -p no:cacheprovider > quick.log 2>&1
echo DONE >> quick.log
