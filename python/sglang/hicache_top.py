"""Shows a server's cache in a terminal: tiers, flows, hits, drafts, tenants, decisions, store.

    python -m sglang.hicache_top http://127.0.0.1:30000
    python -m sglang.hicache_top http://127.0.0.1:30000 --once

It shows what `GET /hicache` answers. The key comes from --admin-api-key-file, SGLANG_ADMIN_API_KEY
or, for a server without an admin key, SGLANG_API_KEY. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sglang.srt.arg_groups.api_keys import resolve_key
from sglang.srt.environ import envs
from sglang.srt.utils.error_answers import error_text

_TIMEOUT_S: Final = 15.0
_MAX_BYTES: Final = 1 << 22
_STYLES: Final = {
    "requests": "blue", "used": "blue", "device": "blue", "locked": "dark_orange3",
    "evictable": "green", "host": "green", "in_flight": "medium_purple", "storage": "medium_purple",
    "free": "grey50", "computed": "grey50",
}  # fmt: skip
_WORDS: Final = {
    "requests": "of running requests", "locked": "in use", "evictable": "evictable",
    "in_flight": "in flight", "used": "used", "free": "free", "device": "L1",
    "host": "L2", "storage": "L3", "computed": "computed",
}  # fmt: skip
_MISSED: Final = {
    "evicted": "were here before, and evicted", "no_state": "lacked a recurrent state",
    "logprobs": "for logprobs", "new": "new",
}  # fmt: skip
_FLOWS: Final = {
    "written": "L1 to L2: copied", "loaded": "L2 to L1: loaded", "stored": "L2 to L3: written",
    "read": "L3 to L2: read", "evicted_device": "evicted from L1",
    "evicted_host": "evicted from L2", "computed": "computed",
}  # fmt: skip
_PYTHON: Final = r"torch\.|['\[\]]"
"""Python's notation in what a page has."""
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_SPARK: Final = 40
_HISTORY_S: Final = 300.0


class NoAnswer(Exception):
    """The server did not answer as a server of this engine does. The message is one line."""


def ask(url: str, key: str | None, dp_rank: int = 0) -> dict[str, Any]:
    """The answer of `GET /hicache` at `url`, about one DP group. Raises NoAnswer with the
    remedy."""
    headers = {"Accept": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    try:
        address = f"{url.rstrip('/')}/hicache?dp_rank={dp_rank}"
        request = urllib.request.Request(address, headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            view = json.loads(answer.read(_MAX_BYTES))
    except urllib.error.HTTPError as error:
        why = error_text(error.read(_MAX_BYTES))
        remedy = ""
        if error.code in (401, 403):
            remedy = ": give the key by --admin-api-key-file or SGLANG_ADMIN_API_KEY"
        elif error.code == 404:
            why = "nothing is at /hicache: give the address of a server, not of a router"
        raise NoAnswer(f"{url} refuses ({error.code}): {why}{remedy}") from None
    except (OSError, ValueError) as error:
        raise NoAnswer(f"{url}: {error}; give the address of a running server") from None
    if not isinstance(view, dict) or "tiers" not in view:
        raise NoAnswer(f"{url} is no server of this engine")
    return view


def draw(view: Mapping[str, Any], width: int) -> RenderableType:
    """Everything about a cache, for a terminal of `width` characters."""
    history = [sample for sample in view["history"] if sample["age_s"] <= _HISTORY_S]
    title = Text.assemble(
        ("Prefix cache", "bold"),
        f"  {view['model_name']}, pages of {view['page_size']} tokens, "
        f"eviction {view['eviction_policy']}",
    )
    if view["disaggregation_mode"] != "null":
        title.append(f", {view['disaggregation_mode']} server")
    if view["disaggregation_mode"] == "decode":
        title.append(' ("computed": by prefill servers)')
    if view["dp_size"] > 1:
        title.append(f", DP group {view['dp_rank']} of 0 to {view['dp_size'] - 1}")
    queues = ", ".join(f"{name} {count}" for name, count in view["queues"].items())
    return Group(
        title,
        Text(queues, "dim"),
        *(Text(f"\n{verdict}", "bold red") for verdict in view["verdicts"]),
        *(_tier(tier, width) for tier in view["tiers"]),
        *_hits(history, view["missed"], width),
        _flows(history),
        *_speculation(view["speculation"]),
        _tenants(view["tenants"]),
        _prefixes(view["prefixes"]),
        _decisions(view["decisions"], view["words"]),
        _store(view["store"], view["words"]),
    )


def _short(value: float | None) -> str:
    if value is None:
        return "unknown"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f} {unit}"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _amount(value: float, unit: str) -> str:
    text = _short(value)
    if unit != "bytes":
        return text
    return f"{text} B" if text[-1].isdigit() else f"{text}B"


def _bar(parts: Mapping[str, int], width: int, unit: str = "") -> Text:
    """A bar of `width` characters, and its legend, whose amounts are of `unit`."""
    total = sum(parts.values())
    bar, done = Text(), 0
    for name, value in parts.items():
        before = round(done / total * width) if total else 0
        done += value
        after = round(done / total * width) if total else 0
        bar.append(("░" if name in ("free", "computed") else "█") * (after - before), _STYLES[name])
    bar.append("\n")
    for name, value in parts.items():
        share = f"{value / total:.0%}" if total else "0%"
        bar.append("■ ", _STYLES[name])
        bar.append(f"{_WORDS[name]} {_amount(value, unit)} ({share})   ")
    return bar


def _tier(tier: Mapping[str, Any], width: int) -> Text:
    unit = tier["unit"]
    size = "size unknown"
    if tier["total"] is not None:
        size = _amount(tier["total"], unit) + ("" if unit == "bytes" else f" {unit}")
    head = Text.assemble(f"\n{tier['name']} ", (f"{tier['where']}, {size}", "dim"))
    if tier["in_flight"]:
        head.append(f", {_short(tier['in_flight'])} tokens in flight", "dim")
    if tier["parts"]:
        head.append("\n").append_text(_bar(tier["parts"], width, unit))
    return head


def _hits(
    history: Sequence[Mapping[str, Any]], missed: Mapping[str, int], width: int
) -> list[RenderableType]:
    first, last = history[0]["counts"], history[-1]["counts"]
    lines: list[RenderableType] = []
    recent = f"the last {history[0]['age_s']:.0f} s"
    for title, since in (("since the start", None), (recent, first)):
        parts = {
            name: last[counted] - (since[counted] if since else 0)
            for name in ("device", "host", "storage", "computed")
            for counted in (name if name == "computed" else f"hit_{name}",)
        }
        total = sum(parts.values())
        share = (total - parts["computed"]) / total if total else 0.0
        head = Text(f"\n{share:.0%} of the prompts' tokens reused, {title}\n")
        lines.append(head.append_text(_bar(parts, width)))
    reasons = (f"{_short(n)} {_MISSED.get(name, name)}" for name, n in missed.items() if n)
    lines.append(Text(f"computed since the start: {', '.join(reasons) or 'none'}", "dim"))
    return lines


def _spark(history: Sequence[Mapping[str, Any]], name: str) -> tuple[str, float]:
    """Rates over the last five minutes as a line of blocks, and the last rate, per second."""
    rates, last = [0.0] * _SPARK, 0.0
    for before, now in itertools.pairwise(history):
        seconds = before["age_s"] - now["age_s"]
        if seconds < 0.5:
            continue
        last = (now["counts"][name] - before["counts"][name]) / seconds
        begin, end = (int((1 - sample["age_s"] / _HISTORY_S) * _SPARK) for sample in (before, now))
        for place in range(begin, min(max(end, begin + 1), _SPARK)):
            rates[place] = max(rates[place], last)
    most = max(rates) or 1.0
    return "".join(_BLOCKS[math.ceil(8 * rate / most)] for rate in rates), last


def _table(title: str, *columns: str) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", box=None, pad_edge=False)
    for column in columns:
        is_number = column.startswith("#")
        table.add_column(column.lstrip("#"), justify="right" if is_number else "left")
    return table


def _flows(history: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("Flows of the last five minutes", "flow", "#tokens/s", "#in all", "")
    first, last = history[0]["counts"], history[-1]["counts"]
    for name, label in _FLOWS.items():
        if name in last:
            line, rate = _spark(history, name)
            table.add_row(label, _short(rate), _short(last[name] - first[name]), line)
    return table


def _speculation(drafts: Mapping[str, Any] | None) -> list[RenderableType]:
    """Acceptance by tier, and which batches verify drafts. Empty if `drafts` is None."""
    if drafts is None:
        return []
    title = f"Speculation since the start, {drafts['num_drafts']} drafts a verification"
    tiers = _table(title, "prefix from", "#verifications", "#drafts accepted", "#mean length")
    for name, one in drafts["tiers"].items():
        if one["count"]:
            share = one["accepted"] / (one["count"] * drafts["num_drafts"])
            length = 1 + one["accepted"] / one["count"]
            row = _short(one["count"]), f"{share:.0%}", f"{length:.2f}"
            tiers.add_row("no tier" if name == "none" else _WORDS[name], *row)
    if drafts["always"]:
        always = f"up to {drafts['largest_batch']} requests always (SGLANG_SPECULATE_ALWAYS)"
        return [tiers, Text(f"\ndrafts: {always}", "dim")]
    if not drafts["sizes"]:
        return [tiers, Text("\ndrafts: on, no step has been measured yet", "dim")]
    columns = "#batches of", "drafts", "#verification ms", "#tokens of one", "#plain step ms"
    sizes = _table("Drafts by batch size, the last steps", *columns)
    for one in drafts["sizes"]:
        figures = (one[name] for name in ("verification_ms", "tokens", "plain_ms"))
        first, last = one["first"], one["last"]
        sizes.add_row(
            f"{first}" if first == last else f"{first} to {last}",
            "on" if one["verifies"] else "off",
            *("" if figure is None else f"{figure:.2f}" for figure in figures),
        )
    return [tiers, sizes]


def _tenants(tenants: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(
        "Tenants: tokens of prompts since the start, and bytes held now",
        "tenant", "#requests", "#hits", "#L1", "#L2", "#L3", "#computed", "#in L1", "#in L2",
        "#evicted*", "#lost",
    )  # fmt: skip
    for one in tenants[:8]:
        held, requests = one["held_bytes"], one["requests"]
        table.add_row(
            one["tenant"],
            _short(requests),
            f"{one['hits'] / requests:.0%}" if requests else "",
            *(_short(one["tokens"][name]) for name in ("device", "host", "storage", "computed")),
            *(f"{_short(held[tier])}B" if tier in held else "" for tier in ("device", "host")),
            _short(one["evicted_others"]),
            _short(one["lost"]),
        )
    table.caption = Text("* of other tenants", "dim")
    table.caption_justify = "left"
    return table


def _why(one: Mapping[str, Any], words: Mapping[str, str]) -> str:
    """The reason of a decision; of an eviction also for whom, and whose pages went."""
    why: str = words.get(one["why"], one["why"])
    if not one["of"]:
        return why
    who = f", for {one['request'] or 'one'}" if one["request"] or one["tenant"] else ""
    tenant = f" {_owner(one['tenant'])}" if one["tenant"] else ""
    return f"{why}{who}{tenant}; pages {', '.join(map(_owner, one['of']))}"


def _owner(tenant: str) -> str:
    """Words behind what belongs to a tenant."""
    named = {"none": "without a key", "other": "of all others"}
    return named.get(tenant, f"of {tenant}")


def _prefixes(prefixes: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("Busiest prefixes", "prefix", "#tokens", "#uses", "tiers", "#waiting")
    for one in prefixes[:8]:
        where = " ".join(one["tiers"]) + (", in use" if one["locked"] else "")
        numbers = _short(one["tokens"]), _short(one["uses"])
        table.add_row(one["hash"], *numbers, where, _short(one["waiting"]))
    return table


def _decisions(decisions: Sequence[Mapping[str, Any]], words: Mapping[str, str]) -> Table:
    table = _table("Last decisions", "#ago", "what", "why", "#tokens", "#times")
    for one in decisions[:10]:
        numbers = _short(one["tokens"]), _short(one["count"])
        table.add_row(f"{one['age_s']:.0f} s", one["what"], _why(one, words), *numbers)
    return table


def _store(store: Mapping[str, Any] | None, words: Mapping[str, str]) -> Text:
    if store is None:
        return Text("\nStore (L3): none is attached")
    state = ("answers", "green") if store["is_available"] else ("does not answer", "red")
    line = Text.assemble("\nStore (L3): ", store["backend"], " ", state)
    line.append(f", namespace {store['namespace']}, prefetch {store['prefetch_policy']}")
    pages = ", ".join(
        f"{name.replace('_', ' ')} {re.sub(_PYTHON, '', str(value))}"
        for name, value in store["pages_of"].items()
        if value
    )
    line.append(f"\npages of {pages}", "dim")
    if servers := store["servers"]:
        line.append(
            f"\nshared by {servers} servers, with this one"
            if servers > 1
            else "\nshared by no other server"
        )
    if others := (store["usage"] or {}).get("num_other_namespaces"):
        line.append(f"\n{others} other namespaces, whose pages this server cannot read", "dim")
    if unlike := (store["usage"] or {}).get("unlike_nodes"):
        line.append(f"\nstore nodes with another protocol: {', '.join(unlike)}", "bold red")
    if gone := [name for name, serves in store["nodes"].items() if not serves]:
        line.append(f"\nstore nodes that are gone: {', '.join(gone)}", "bold red")
    for kind in ("reads", "writes"):
        counts = ", ".join(
            f"{words.get(why, why)} {_short(count)}" for why, count in store[kind].items()
        )
        line.append(f"\n{kind}: {counts or 'none'}", "dim")
    return line


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    first_line = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser("python -m sglang.hicache_top", description=first_line)
    parser.add_argument("url", help="address of the server, such as http://127.0.0.1:30000")
    parser.add_argument("--once", action="store_true", help="show it once and end")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two questions")
    parser.add_argument("--admin-api-key-file", help="file with the server's key")
    parser.add_argument("--dp-rank", type=int, default=0, help="DP group to show; absent: 0")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Show the cache until Ctrl-C, or once. Returns 1 if the server does not answer."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not 0.1 <= args.interval <= 3600:
        parser.error(f"--interval {args.interval}: give seconds from 0.1 to 3600")
    if not args.url.startswith(("http://", "https://")):
        parser.error(f"url {args.url!r}: begin it with http:// or https://")
    try:
        key = resolve_key(
            None, args.admin_api_key_file, "--admin-api-key", envs.SGLANG_ADMIN_API_KEY
        )
    except ValueError as error:
        parser.error(str(error))
    key = key or envs.SGLANG_API_KEY.get()
    console = Console()
    # A shell without job control starts background processes that ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        drawn = draw(ask(args.url, key, args.dp_rank), console.width)
        if args.once:
            console.print(drawn)
            return 0
        with Live(drawn, console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(args.interval)
                live.update(draw(ask(args.url, key, args.dp_rank), console.width), refresh=True)
    except NoAnswer as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
