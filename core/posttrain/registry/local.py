"""Plugin files that a pipeline names: `plugins: [./rewards.py]`.

A file implements the same hooks as a package and needs no installation. Its identity in keys is the digest of
that one file. So it should hold all it needs: modules beside it are not on the import path, relative imports
fail, and a module it imports from elsewhere is not part of the digest.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class LocalFile:
    """One plugin file as it was read: what is hashed is what is executed."""

    path: Path
    source: bytes

    @classmethod
    def read(cls, path: Path) -> LocalFile:
        """Read the file; raise `OSError` when that fails."""
        resolved = path.resolve()
        return cls(resolved, resolved.read_bytes())

    @property
    def digest(self) -> str:
        """The sha256 of the file."""
        return hashlib.sha256(self.source).hexdigest()

    @property
    def module(self) -> str:
        """The module name: unique for path and content, so an edited file is another module."""
        identity = hashlib.sha256(f"{self.path}\0{self.digest}".encode()).hexdigest()
        return f"_posttrain_local_{re.sub(r'[^A-Za-z0-9_]', '_', self.path.stem)}_{identity[:16]}"

    def load(self) -> ModuleType:
        """Import the file, once per process and content. A failed import leaves nothing behind."""
        if self.module in sys.modules:
            return sys.modules[self.module]
        loader = _BytesLoader(self)
        spec = importlib.util.spec_from_file_location(self.module, self.path, loader=loader)
        if spec is None:
            raise ImportError(f"{self.path} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[self.module]
            raise
        return module


class _BytesLoader(importlib.abc.SourceLoader):
    """Executes the bytes already read and writes no byte code beside the user's file."""

    def __init__(self, file: LocalFile) -> None:
        self.file = file

    def get_filename(self, fullname: str) -> str:
        return str(self.file.path)

    def get_data(self, path: str | bytes) -> bytes:
        return self.file.source
