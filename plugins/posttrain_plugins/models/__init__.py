"""Models: the artifact on disk, opening and saving it, and the stages that make or load one."""
