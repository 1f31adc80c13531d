"""The command `agentcache serve`. Answers /health before torch is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench.options import DeviceOption, Dtype, Weights, WeightsOption
from ..errors import ConfigError
from .store import PolicyOption, StoreOption, check_folder, given_system, given_tools, named_adapter

if TYPE_CHECKING:
    from ..engine import Engine
    from ..server.served_models import ServedModel
    from ..server.tenants import Tenants


def serve(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Folders or ids, as PATH or NAME=PATH; the first loads at once.")],
    host: Annotated[str, typer.Option(help="Address to listen on; one that others reach needs --keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for one that is free.")] = 8787,
    keys: Annotated[Path | None, typer.Option(metavar="FILE", help="TOML file of API keys and their namespaces.")] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="An adapter of the first model, which answers under its name; repeatable.")
    ] = None,
    warm: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON list of tools to compute first, in each key's namespace.")] = None,
    system: Annotated[str | None, typer.Option(metavar="FILE|TEXT", help="System prompt of --warm.")] = None,
    idle: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Close a model that was not used for so long; 0: never.")] = 0.0,
    requests: Annotated[int, typer.Option(min=1, help="Requests that may run at once.")] = 64,
    timeout: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Time for one whole answer.")] = 600.0,
    dtype: Annotated[Dtype | None, typer.Option(help="Type of the weights; by default as they were saved.")] = None,
    device: DeviceOption = "cpu",
    weights: WeightsOption = None,
    bits: Annotated[int | None, typer.Option(help="Quantize the weights with bitsandbytes: 4 (NF4) or 8 (int8).")] = None,
    policy: PolicyOption = None,
    receipts: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder in which each request leaves a receipt.")] = None,
    store: StoreOption = None,
) -> None:
    """Serve models: OpenAI's and Anthropic's API, tool groups, a page."""
    try:
        from ..server.app import LOCAL, create_app
        from ..server.listening import EndingServer, listening
        from ..server.registered_tools import RegisteredTools
        from ..server.served_models import ServedModels
        from ..server.state import ServerState
        from ..server.tenants import Tenants
    except ImportError as error:
        raise ConfigError(f"serve: {error.name!r} is missing: pip install 'agentcache-llm[server]'") from error
    _check(timeout, policy, device, weights, bits, receipts)
    tenants = Tenants.read(keys, requests)
    if host not in LOCAL and not tenants.asks_for_keys:
        raise ConfigError(f"--host={host!r}: others could reach it: give --keys FILE, or listen on {LOCAL[0]}")
    options: dict[str, Any] = {"dtype": dtype and dtype.value, "device": device, "weights": weights and weights.value, "policy": policy}
    options |= {"receipts": receipts, "load_in_4bit": bits == 4, "load_in_8bit": bits == 8, **({} if store is None else {"store": store})}
    adapters = dict(named_adapter(said) for said in adapter or ())
    served = [
        _served(said, {**options, "adapters": {} if number else adapters}, None if number else warm, system, tenants)
        for number, said in enumerate(models)
    ]
    if len({*adapters, *(model.name for model in served)}) < len(adapter or ()) + len(served):
        raise ConfigError(f"models={models!r}, --adapter={adapter or []!r}: two have one name; give NAME=PATH")
    state = ServerState(ServedModels(served, idle), tenants, RegisteredTools(_folder(store)), answer_s=timeout)
    with listening(host, port) as listener:
        address, bound = listener.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        typer.echo(f"agentcache serves {', '.join(state.models.names)} on http://{shown}:{bound}")
        EndingServer(create_app(state), state.closing).run([listener])


def _check(
    timeout: float, policy: Path | None, device: str, weights: Weights | None, bits: int | None, receipts: Path | None = None
) -> None:
    """Refuse, before it listens, what each engine would refuse later."""
    if not timeout:
        raise ConfigError(f"--timeout={timeout!r}: no answer is whole in no time; give seconds, or inf for no bound")
    if policy is not None:
        from ..policy import Policy

        Policy.read(policy)
    if receipts is not None:
        from ..receipt_log import ReceiptLog

        ReceiptLog(receipts)
    if device != "cpu":
        from ..model.loading import place

        place(device)
    if bits not in (None, 4, 8):
        raise ConfigError(f"--bits={bits!r}: must be 4 or 8")
    if bits and weights:
        raise ConfigError(f"--bits={bits!r} and --weights={weights.value!r}: choose one")


def _folder(store: Path | None) -> Path | None:
    """The folder of registered tool groups: beside the store, unless it is encrypted or there is none."""
    from ..private import default_path

    place = store or default_path()
    if place is None or os.environ.get("AGENTCACHE_KEY"):
        return None
    from ..store.disk.folder import Folder

    return Folder.open(place, create=True).path


def _served(said: str, options: Mapping[str, Any], warm: Path | None, system: str | None, tenants: Tenants) -> ServedModel:
    """A model as the command line names it. options: of its engine; each tenant finds what is warmed."""
    from ..server.served_models import ServedModel

    name, sep, path = said.partition("=")
    path = path if sep else said
    if not path or not name:
        raise ConfigError(f"MODEL={said!r}: give a folder, an id, or NAME=PATH")
    check_folder("MODEL", path)
    shown = name if sep else Path(path).name if os.path.isdir(path) else path
    prompt, tools = given_system(system), given_tools(warm, "--warm")

    def open_engine(say: Callable[[str], None]) -> Engine:
        say("importing torch and transformers")
        from ..engine import Engine as Opened

        say("loading weights")
        engine = Opened(path, **options)
        if warm is not None or system is not None:
            say("computing the tool group")
            try:
                for tenant in tenants:
                    tenant.check_pins(engine.warm(prompt, tools, name="served", namespace=tenant.namespace), engine)
            except BaseException:
                engine.close()
                raise
        return engine

    return ServedModel(shown, open_engine, adapters=tuple(options["adapters"]))
