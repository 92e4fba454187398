"""The program that downloads a model from the hub into a folder; `hub.py` runs it.

    python -m kakeya.weights.hub_child ORG/NAME FOLDER

It writes one JSON object a line: {"files": {NAME: [BYTES, SHA256]}}, with "" for a digest that the
hub does not tell, and, where it fails, {"error": KIND, "message": TEXT}. Behind the files it waits
for a byte from its parent, which makes room. It ends with its parent, and a download that was cut
off goes on where it was.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from kakeya.core.errors import InvalidArgument
from kakeya.weights.manifest import SUFFIXES, check_file_name

WEIGHTS = ".safetensors"


def wanted_files(names: Collection[str]) -> list[str]:
    """The files of a repository that make up a model. Raises InvalidArgument where there are none,
    or only such that a node does not load."""
    top = [name for name in names if "/" not in name]
    if "model_index.json" in top or not any(name.endswith(WEIGHTS) for name in top):
        raise InvalidArgument(
            "the repository has no *.safetensors of a text model; download what it has by hand, "
            "and give the node its path"
        )
    sharded = any(name.startswith("model") and name.endswith(WEIGHTS) for name in top)
    found = []
    for name in sorted(names):
        parts = PurePosixPath(name).parts
        is_weights = name.endswith(WEIGHTS)
        is_other_weights = is_weights and (len(parts) > 1 or (sharded and "model" not in name[:5]))
        is_text = len(parts) == 1 or parts[0] in ("1_Pooling", "additional_chat_templates")
        if is_text and not is_other_weights and PurePosixPath(name).suffix in SUFFIXES - {".gguf"}:
            check_file_name(name)
            found.append(name)
    return found


def main() -> int:
    """Download; return the exit status."""
    repository, folder = sys.argv[1:]
    has_room = threading.Event()
    threading.Thread(target=_end_with_parent, args=(has_room,), daemon=True).start()
    # Its bars would fill the log of the node.
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    import huggingface_hub
    from huggingface_hub import errors

    try:
        api = huggingface_hub.HfApi()
        info = api.model_info(repository, files_metadata=True)
        listed = {one.rfilename: one for one in info.siblings or ()}
        wanted = wanted_files(listed)
        _say(
            files={
                name: [
                    listed[name].size or 0,
                    (told.sha256 if (told := listed[name].lfs) is not None else "") or "",
                ]
                for name in wanted
            }
        )
        has_room.wait()
        for name in wanted:
            huggingface_hub.hf_hub_download(
                repository, name, revision=info.sha, local_dir=Path(folder)
            )
    except errors.GatedRepoError as problem:
        return _fail("denied", problem)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as problem:
        return _fail("missing", problem)
    except InvalidArgument as problem:
        return _fail("unsuitable", problem)
    except Exception as problem:  # noqa: BLE001 - whatever the library raises is told
        is_full = isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT)
        return _fail("full" if is_full else "offline", problem)
    return 0


def _fail(kind: str, problem: Exception) -> int:
    lines = str(problem).strip().splitlines() or [type(problem).__name__]
    _say(error=kind, message=lines[0][:300])
    return 1


def _say(**told: object) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def _end_with_parent(has_room: threading.Event) -> None:
    while os.read(0, 1):  # not by sys.stdin, the lock of which ends the interpreter badly
        has_room.set()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
