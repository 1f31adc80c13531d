"""What a model is made of: checked before weights are loaded, and kept, so that a copy elsewhere loads the same. Knows no requests."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from agentcache import Engine, Loading, RemoteEngine, foreign_settings
from agentcache.errors import ConfigError

from .names import joined, mapping, said
from .requests import FORMS, REQUEST, SAMPLING

SERVER = frozenset(("base_url", "api_key"))
ENGINE = SERVER | frozenset(inspect.signature(Engine.__init__).parameters) - {"self", "loading"} | Loading.__annotations__.keys()
GIVE_AGAIN = "give_again"  # where a written model names what could not be written


@dataclass(frozen=True, slots=True)
class SavedArgs:
    """plain: the Engine's options, as JSON has them. objects: names of the arguments that live in this process only."""

    plain: Mapping[str, Any]
    objects: tuple[str, ...]

    def written(self, functions: Collection[str]) -> dict[str, Any]:
        """What `from_dict` needs beside the fields. functions: settings that must be given again, too."""
        again = [*self.objects, *functions]
        return {**self.plain, **({GIVE_AGAIN: again} if again else {})}

    def check_pickled(self, name: str) -> None:
        """Refuse what could only be made again as another model."""
        if self.objects:
            give = ", ".join(f"{one}=..." for one in self.objects)
            raise ConfigError(
                f"model {name!r} with its {list(self.objects)!r} cannot be pickled: they live in this process only. "
                f"Send data = llm.to_dict(), and make it again as AgentCacheLLM.from_dict(data, {give})"
            )


def renamed(model: Any, given: Mapping[str, Any], fields: Collection[str]) -> tuple[Any, dict[str, Any]]:
    """(model, options) of a constructor in this package's words; ConfigError where a name means something that is not here.

    fields: options of every request that are no field of the model go into additional_kwargs.
    """
    options = dict(given)
    name = options.pop("model_name", None)
    if name is not None and isinstance(model, str) and model != name:
        raise ConfigError(f"model={model!r} and model_name={name!r}: two models; give model= alone")
    model = name if model is None else model  # of a loaded model HuggingFaceLLM does not use the name either
    if options.get("tokenizer_name") in (None, model) or not isinstance(model, (str, os.PathLike, type(None))):  # nor of a tokenizer
        options.pop("tokenizer_name", None)
    for flag in ("is_chat_model", "is_function_calling_model"):
        if options.pop(flag, True) is not True:
            raise ConfigError(f"{flag}=False: this model takes messages and tools; StableReActAgent shows tools as text")
    options.pop("tokenizer_outputs_to_remove", None)  # the model is given ids and nothing else
    for inside in ("model_kwargs", "generate_kwargs"):
        options = joined(options, mapping(inside, options.pop(inside, None)), inside)
    if "device_map" in options:
        options = joined(options, _device(options.pop("device_map")), "device_map")
    options = said(options)
    every = {one: options.pop(one) for one in list(options) if one in (*SAMPLING, *REQUEST, *FORMS) and one not in (*fields, *ENGINE)}
    if every:
        options["additional_kwargs"] = joined(mapping("additional_kwargs", options.get("additional_kwargs")), every, "additional_kwargs")
    if unknown := sorted(set(options) - {*ENGINE, *fields}):
        near = foreign_settings.did_you_mean(unknown, {*ENGINE, *fields, *SAMPLING, *REQUEST, *FORMS})
        raise ConfigError(f"unknown options {unknown!r}: neither AgentCacheLLM nor Engine has them{near}")
    return model, options


def _device(asked: Any) -> dict[str, Any]:
    """The one device that a device_map names, as far as it does."""
    place = foreign_settings.device_of(asked)
    if place == "auto":  # from_pretrained's takes the GPU where there is one
        import torch

        place = "cuda" if torch.cuda.is_available() else None
    return {} if place is None else {"device": place}


def saved_args(model: Any, tokenizer: Any, engine: Any, options: Mapping[str, Any]) -> SavedArgs:
    """How these arguments make a model; refuses those that cannot."""
    if not isinstance(engine, (Engine, RemoteEngine, type(None))):
        raise ConfigError(f"engine={engine!r:.100}: must be an agentcache.Engine; a name or a folder goes into model=")
    if engine is not None and (model is not None or options):
        raise ConfigError(f"engine= comes ready made: leave out model={model!r:.80} and {sorted(options)!r}")
    if engine is None and options.get("base_url") is not None:
        return _of_server(model, tokenizer, options)
    if engine is None and model is None:
        raise ConfigError("model=None: give a Hugging Face id, a folder, a loaded model with its tokenizer, engine=, or base_url=")
    if options.get("api_key") is not None:
        raise ConfigError("api_key: is for base_url=, the address of an `agentcache serve`")
    if engine is not None:
        return SavedArgs({}, ("engine",))
    given = {"tokenizer": tokenizer, **{name: _plain(name, value) for name, value in options.items()}}
    if not isinstance(model, (str, os.PathLike)):
        given["model"] = model
    private = {"token"} if options.get("token") else set()
    objects = tuple(sorted(private | {name for name, value in given.items() if not isinstance(value, (str, int, float, type(None)))}))
    return SavedArgs({name: value for name, value in given.items() if name not in objects and name != "tokenizer"}, objects)


def _of_server(model: Any, tokenizer: Any, options: Mapping[str, Any]) -> SavedArgs:
    """How a server and a key make a model; the key is given again."""
    if not isinstance(model, (str, type(None))) or tokenizer is not None:
        raise ConfigError(f"model={model!r:.100}: with base_url= it is one of the server's names, and the tokenizer is there")
    if more := sorted(set(options) - SERVER):
        raise ConfigError(f"{more!r}: the server's engine is made already; say it to `agentcache serve`")
    return SavedArgs({"base_url": options["base_url"]}, ("api_key",) if options.get("api_key") else ())


def _plain(name: str, value: Any) -> Any:
    """An option as JSON has it, if it can be said so."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return str(value).removeprefix("torch.") if name == "dtype" and value is not None else value


def remade(data: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What a written model is made of, with what is given to it again; refuses one that would be another model."""
    kept = {name: value for name, value in data.items() if name != GIVE_AGAIN and not ("engine" in given and name in ENGINE)}
    whole = {"engine", "model"} & set(given)
    others = {"engine", "model", "tokenizer"} if whole else set()
    others |= ENGINE if "engine" in given else set()
    if lost := [one for one in data.get(GIVE_AGAIN) or () if one not in given and one not in others]:
        give = ", ".join(f"{one}=..." for one in lost)
        raise ConfigError(f"{lost!r} of model {data.get('model')!r} lived in the process that wrote it: use from_dict(data, {give})")
    return {**kept, **given}


def name_of(model: Any) -> str:
    """What a model is called: its id, its folder, or its class."""
    if isinstance(model, (str, os.PathLike)):
        return str(os.fspath(model))
    if model is None:
        return ""  # a server's first one
    return getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__
