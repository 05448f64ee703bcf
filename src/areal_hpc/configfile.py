"""From YAML with interpolation and dotted overrides to a checked `Config`, and back.

Source: OmegaConf, structured configs.
"""

from __future__ import annotations

import difflib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from areal_hpc.config import Config, ConfigError


def keys(cls: type = Config, prefix: str = "") -> list[tuple[str, str]]:
    """Every dotted key with its help, in order; a test holds this list."""
    out: list[tuple[str, str]] = []
    for f in fields(cls):
        if is_dataclass(f.default_factory):
            out += keys(f.default_factory, f"{prefix}{f.name}.")
        else:
            out.append((prefix + f.name, f.metadata["help"]))
    return out


def _explain(error: Exception) -> ConfigError:
    """OmegaConf's error as one line that names the key and the nearest known one."""
    full_key = getattr(error, "full_key", None) or ""
    first_line = str(error).strip().splitlines()[0]
    known = [name for name, _ in keys()]
    unknown = type(error).__name__ in ("ConfigKeyError", "ConfigAttributeError")
    if unknown and full_key not in known:
        near = difflib.get_close_matches(full_key, known, 1, 0.3)
        return ConfigError(f"{full_key}: unknown key" + (f"; the nearest known one is {near[0]}" if near else ""))
    return ConfigError(f"{full_key}: {first_line}" if full_key else first_line)


def _check_sections(raw: Any, where: str, cls: type = Config, prefix: str = "") -> None:
    """That what stands for a section is one, or an interpolation; OmegaConf's own error names no key."""
    if isinstance(raw, str) and "${" in raw:
        return
    sections = {f.name: f.default_factory for f in fields(cls) if is_dataclass(f.default_factory)}
    if not isinstance(raw, dict):
        name, known = prefix.removesuffix("."), ", ".join(f.name for f in fields(cls)[:3])
        raise ConfigError(f"{name or where}: {raw} is not a section; expected keys below it like {known}")
    for name in raw.keys() & sections.keys():
        _check_sections(raw[name], where, sections[name], f"{prefix}{name}.")


def load(path: str | Path, overrides: list[str] | None = None) -> Config:
    """The checked configuration of a YAML file with `key=value` overrides.

    Raises ConfigError naming the file or key: unknown key (with the nearest known one),
    wrong type, impossible value, a missing required key.
    """
    if not Path(path).is_file():
        raise ConfigError(f"--config {path}: no such file")
    for item in overrides or []:
        if "=" not in item:
            raise ConfigError(f"{item}: an override has the form key=value")
    try:
        layers = [OmegaConf.load(path), OmegaConf.from_dotlist(list(overrides or []))]
        for layer, where in zip(layers, (str(path), "the command line")):
            _check_sections(OmegaConf.to_container(layer), where)
        node = OmegaConf.merge(OmegaConf.structured(Config), *layers)
        missing = OmegaConf.missing_keys(node)
        if missing:
            raise ConfigError(f"{', '.join(sorted(missing))}: required, and not set in {path} or on the command line")
        config: Config = OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        raise _explain(error) from None
    except YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read as a configuration: {error}") from None
    config.check()
    return config


def dump(config: Config) -> str:
    """The whole configuration as YAML, every default written out; `load` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)
