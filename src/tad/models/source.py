"""Where a checkpoint or an adapter is: a directory, one that comes with this package, or a repository of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from tad.errors import TadError
from tad.models.stored import TEXT_FILES, first_line

BUNDLED = Path(__file__).parents[1] / "bundled"


def bundled_models() -> list[str]:
    """The small models that come with this package."""
    return sorted(path.name for path in BUNDLED.glob("*") if (path / "config.json").is_file())


def bundled_adapters() -> list[str]:
    """The students of those models that come with this package."""
    return sorted(path.name for path in BUNDLED.glob("*") if (path / "adapter_config.json").is_file())


def locate(source: str | Path, revision: str | None = None, weights: bool = True, code: bool = False) -> Path:
    """The directory of a checkpoint or an adapter: as given, bundled with this package, or downloaded from the Hugging Face hub.

    Pickled weights are never fetched. `code` also fetches the repository's Python files, which an export copies and
    nothing here runs.
    """
    if not isinstance(source, (str, Path)):
        raise TadError(f"{source!r}: should be a directory, a hub id or a bundled name")
    path, name = Path(source).expanduser(), str(source)
    bundled = [*bundled_models(), *bundled_adapters()]
    # A run's directory may have the name of the model: it hides the bundled one only if it is a model itself.
    if name in bundled and not any(
        (path / file).is_file() for file in ("config.json", "adapter_config.json")
    ):
        return BUNDLED / name
    if path.is_dir():
        return path
    if path.suffix.lower() == ".gguf" and path.is_file():
        from tad.models.gguf import unpack

        return unpack(path)
    if path.exists():
        raise TadError(f"{source}: is a file; give the directory that holds config.json, or a GGUF file")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise TadError(f"{source}: no such directory (bundled: {', '.join(bundled)})")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*TEXT_FILES, *(["*.safetensors"] if weights else []), *(["*.py"] if code else [])]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except LocalEntryNotFoundError:
        raise TadError(f"{source}: no such directory, and the Hugging Face hub cannot be reached") from None
    except HFValidationError:
        raise TadError(f"{source}: no such directory, and not a hub id of the form owner/name") from None
    except HfHubHTTPError as error:
        at = f" at revision '{revision}'" if revision else ""
        raise TadError(
            f"{source}{at}: no such directory, and the hub answered: {first_line(error)}"
        ) from None
