"""The finished policy as a repository of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from posttrain.contracts.callback import Callback, Training
from posttrain.contracts.component import Config
from posttrain.contracts.stage import Secret
from posttrain.errors import StageError


class HubUploadOptions(Config):
    """Options of the callback `hub_upload`."""

    repo_id: str = Field(
        pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$",
        description="the repository, `OWNER/NAME`; made if need be",
    )
    token: Secret = Field(description="a token that may write there, as `env:HF_TOKEN`")
    private: bool = Field(default=True, description="whether a repository that is made is private")
    revision: str | None = Field(default=None, min_length=1, description="the branch; unset: `main`")
    port: str = Field(default="model", description="which output to upload")
    message: str = Field(default="posttrain", min_length=1, description="the message of the commit")


class HubUpload(Callback):
    """Upload the finished policy. Nothing is uploaded unless this is named, with a repository and a token.

    It is done when the policy is written, at the end of a training that really runs: a stage that is taken from the
    cache uploads nothing. What fails, fails the stage; `resume` tries again without training.
    """

    config = HubUploadOptions
    target = "posttrain_plugins.callbacks.hub_upload:Uploading"
    watches_only = True


class Uploading:
    """Uploads an output port.

    Args:
        training: The training.
        config: The options.
    """

    def __init__(self, training: Training, config: HubUploadOptions) -> None:
        self.context, self.config = training.context, config
        self.token = training.context.secret(config.token) if training.parallel.rank == 0 else ""

    def deliver(self, outputs: Mapping[str, Path]) -> None:
        """Upload the files as one commit.

        Raises:
            StageError: There is no such output, or the hub cannot be reached or refuses.
        """
        from posttrain_plugins.hub import upload

        config = self.config
        if config.port not in outputs:
            known = ", ".join(outputs)
            raise StageError(
                "there is no such output", where="callback hub_upload", found=config.port, expected=known
            )
        url = upload(
            outputs[config.port],
            config.repo_id,
            token=self.token,
            private=config.private,
            revision=config.revision,
            message=config.message,
        )
        self.context.note(f"uploaded to {url}")
