"""Upload an adapter or a whole model to the Hugging Face hub, with a card.

Only weights in safetensors and texts go up: no checkpoints, no pickles. A directory without a README.md gets a card made of
what its files say.
"""

from __future__ import annotations

import os
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from tad.errors import TadError
from tad.models.checkpoint import check_files, read_json
from tad.models.defaults import FILE as GENERATION
from tad.models.defaults import KEY
from tad.models.stored import first_line

FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja", "*.model", "*.md", "LICENSE*")
CARD = "README.md"
_RESULTS = ("adapter", "model")  # where a run of `tad distill` keeps what it made


def push(
    source: str | Path, repo: str, private: bool = False, revision: str | None = None, message: str = ""
) -> str:
    """Create the repository if it is not there, and commit the directory's files to it; returns its address.

    `source` is an adapter, a model, or the directory of a `tad distill` run. Who may write is the hub's own login
    (`hf auth login`) or HF_TOKEN.
    """
    folder, record = find_result(Path(source).expanduser())
    if repo.count("/") != 1:
        raise TadError(f"{repo}: should be owner/name")
    check_files(folder)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        address = str(api.create_repo(repo, private=private, exist_ok=True))
        if not (folder / CARD).exists():
            with tempfile.TemporaryDirectory() as made:
                card = Path(made) / CARD
                card.write_text(make_card(folder, repo, record), encoding="utf-8")
                api.upload_file(
                    path_or_fileobj=card,
                    path_in_repo=CARD,
                    repo_id=repo,
                    revision=revision,
                    commit_message="Model card",
                )
        api.upload_folder(
            folder_path=folder,
            allow_patterns=list(FILES),
            repo_id=repo,
            revision=revision,
            commit_message=message or f"{folder.resolve().name} by tad",
        )
    except LocalTokenNotFoundError:
        raise TadError(f"{repo}: no login; run `hf auth login`, or set HF_TOKEN") from None
    except HFValidationError as error:
        raise TadError(f"{repo}: {' '.join(str(error).split())}") from None
    except _connection_errors() as error:
        raise TadError(
            f"{repo}: the hub cannot be reached ({first_line(error)}); nothing was pushed"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise TadError(f"{repo}: the hub answered: {' '.join(str(error).split())[:300]}") from None
    return address


def _connection_errors() -> tuple[type[Exception], ...]:
    """Of the HTTP library that the hub's client uses, whose name depends on its release."""
    names = [name for name in ("httpx2", "httpx") if find_spec(name)]
    return tuple(import_module(name).TransportError for name in names)


def find_result(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The directory that holds weights, and the record of the run that made them where there is one."""
    for found in (folder, *(folder / name for name in _RESULTS)):
        if (found / "adapter_config.json").is_file() or (found / "config.json").is_file():
            paths = [path for path in (found / "run.json", found.parent / "run.json") if path.is_file()]
            return found, read_json(paths[0]) if paths else {}
    raise TadError(f"{folder}: neither an adapter (adapter_config.json) nor a model (config.json)")


def make_card(folder: Path, repo: str, record: dict[str, Any]) -> str:
    """A card of what the files say: base, training, how it is decoded and loaded."""
    adapter = (folder / "adapter_config.json").is_file()
    base = read_json(folder / "adapter_config.json").get("base_model_name_or_path") if adapter else None
    recipe = record.get("recipe", {})
    base = recipe.get("model", base)
    facts: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "tags": ["diffusion-language-model", "tad", *(["lora"] if adapter else [])],
    }
    if isinstance(base, str) and base.count("/") == 1 and not Path(base).exists():
        facts["base_model"] = base
    load = f'tad.load("{base or "BASE"}", adapter="{repo}")' if adapter else f'tad.load("{repo}")'
    lines = [f"---\n{yaml.safe_dump(facts, sort_keys=False).strip()}\n---", f"# {repo.partition('/')[2]}", ""]
    if adapter:
        lines += [f"A LoRA adapter that makes {base or 'its base'} reveal more tokens per forward.", ""]
    lines += ["    import tad", f"    lm = {load}", '    print(tad.generate(lm, "...").text)', ""]
    if (folder / GENERATION).is_file() and (own := read_json(folder / GENERATION).get(KEY)):
        lines += ["Decoded by default with " + ", ".join(f"{k} {v}" for k, v in own.items()) + ".", ""]
    if recipe:
        call = (record.get("calls") or [{}])[-1]
        objective = recipe.get("objective", {})
        if call.get("window"):  # named in the recipe, and measured
            objective = {**objective, "window": f"{objective['window']}: {call['window']}"}
        settings = ", ".join(f"{key} {value}" for key, value in objective.items() if key != "name")
        lines += [
            "## Training",
            f"Objective {objective.get('name')} ({settings}), {call.get('steps')} steps of "
            f"{recipe.get('batch', {}).get('size')} states, {call.get('trajectories')} trajectories, rate "
            f"{recipe.get('learning', {}).get('lr')}, seed {recipe.get('seed')}, on {call.get('device')}.",
            "",
        ]
    lines.append("Not evaluated here: add a table of `tad eval` before you rely on it.")
    return "\n".join(lines) + "\n"
