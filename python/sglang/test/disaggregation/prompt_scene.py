"""A prompt on its way between two small pools: the desk, the mover of bytes, the threads."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from sglang.srt.disaggregation.common.bootstrap_route import Route
from sglang.srt.disaggregation.common.conversation import Patience
from sglang.srt.disaggregation.common.geometry import PoolGeometry
from sglang.srt.disaggregation.common.link_costs import LinkCosts
from sglang.srt.disaggregation.common.metadata_reader import MetadataReader
from sglang.srt.disaggregation.common.packing import Packer
from sglang.srt.disaggregation.common.protocol import FirstToken, RowsOffer
from sglang.srt.disaggregation.common.rank_map import RankPlace
from sglang.srt.disaggregation.common.remote_prompt import OwnSlots
from sglang.srt.disaggregation.common.room_desk import RoomDesk
from sglang.srt.disaggregation.common.sessions import Sessions
from sglang.srt.disaggregation.common.staging import Staging
from sglang.srt.disaggregation.common.whole_prompt import Means, WholePrompt
from sglang.srt.disaggregation.contact import Contact
from sglang.srt.disaggregation.prefill_peer import PrefillPeer
from sglang.srt.distributed.device_communicators.call_threads import CallThreads
from sglang.srt.managers.messages.io_struct import Bootstrap
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.utils.network import wait_until
from sglang.test.disaggregation.control_proxy import ControlProxy
from sglang.test.disaggregation.pd_rig import SLOW_BLOCKS, LocalMover, one_rank

PAGE, PAGES, ROOM = 2, 16, 5
TOKEN = FirstToken(token_id=7, prompt_len=9, prompt_digest="d")
PATIENT = Patience(bootstrap=60, waiting=60, silence=30)
HASTY = Patience(bootstrap=0.3, waiting=0.3, silence=0.4)


def until(is_so: Callable[[], bool]) -> None:
    assert wait_until(is_so, 10, interval=0.005)


class Place:
    """A pool of two layers whose pages can be told apart, and its geometry."""

    def __init__(self, value: float) -> None:
        self.pool = MHATokenToKVPool(PAGE * PAGES, PAGE, torch.float32, 1, 2, 2, "cpu")
        for number, buffer in enumerate(buffer for part in self.pool.parts for buffer in part):
            slots = torch.arange(len(buffer)).reshape(-1, 1, 1)
            buffer.copy_((value + number + slots * 0.01) * torch.ones(1, 1, 2))
        self.geometry = PoolGeometry.of([self.pool], "w", torch.float32)

    def page(self, page: int) -> torch.Tensor:
        """Content of a page in all buffers: `[buffers, page size, 2]`."""
        span = slice(page * PAGE, (page + 1) * PAGE)
        buffers = [buffer for part in self.pool.parts for buffer in part]
        return torch.stack([buffer[span, 0].clone() for buffer in buffers])


class Scene:
    """Both places, the desk, and the mover of bytes.

    Args:
        unit_bytes: Bytes of a unit of packed pages; None: pages are not packed.
        link: Costs of the link on which pages are packed.
        rows: Rows of metadata that the desk offers.
    """

    def __init__(
        self,
        unit_bytes: int | None = None,
        link: LinkCosts = SLOW_BLOCKS,
        rows: RowsOffer | None = None,
    ) -> None:
        self.there, self.here = Place(100), Place(500)
        self.mover = LocalMover()
        self.sessions = Sessions(self.mover, lambda endpoint: endpoint not in self.mover.gone)
        self.unit_bytes = unit_bytes
        self.link = None if unit_bytes is None else link
        self.units, self.staging = self._make_staging(), self._make_staging()
        """Staging memory of the desk, and of the prompts."""
        session_id = self.mover.get_session_id()
        offer = self.there.geometry.offer(
            "instance", session_id, unit_bytes=unit_bytes or 0, rows=rows
        )
        packer = None if unit_bytes is None else Packer(self.there.geometry.page_rows(), self.units)
        self.desk = RoomDesk(offer, "127.0.0.1", unwanted_s=300, silent_s=300, packer=packer)
        self.endpoint = f"tcp://127.0.0.1:{self.desk.port}"
        self._readers = itertools.count()
        self.prompts: list[tuple[WholePrompt, threading.Thread]] = []

    def _make_staging(self) -> Staging:
        cpu = torch.device("cpu")
        if self.unit_bytes is None:
            return Staging(self.mover, cpu)
        return Staging(self.mover, cpu, num_bytes=self.unit_bytes)

    def means(self, patience: Patience = PATIENT, **fields: Any) -> Means:
        """Means of the rank; `fields` replaces some."""
        means = Means(
            place=RankPlace(),
            geometry=self.here.geometry,
            mover=self.mover,
            staging=self.staging,
            metadata=MetadataReader(),
            sessions=self.sessions,
            find_rank=lambda *_: one_rank(self.endpoint),
            patience=patience,
            link=self.link,
        )
        return dataclasses.replace(means, **fields)

    def begin(
        self,
        own_pages: Sequence[int],
        first_page: int = 0,
        patience: Patience = PATIENT,
        **fields: Any,
    ) -> WholePrompt:
        prompt = WholePrompt(
            Bootstrap("host", 1, fields.pop("room", ROOM)),
            (one_rank(self.endpoint),),
            OwnSlots(pages=own_pages, first_page=first_page),
            self.means(
                patience,
                mover=fields.pop("mover", self.mover),
                metadata=fields.pop("metadata", MetadataReader()),
            ),
            f"reader {next(self._readers)}",
            **fields,
        )
        thread = threading.Thread(target=prompt.run, daemon=True)
        thread.start()
        self.prompts.append((prompt, thread))
        return prompt

    def end(self, prompt: WholePrompt) -> WholePrompt:
        """`prompt`, once its thread has ended."""
        (thread,) = [thread for one, thread in self.prompts if one is prompt]
        thread.join(30)
        assert not thread.is_alive(), "it has not ended"
        return prompt

    def failure(self, prompt: WholePrompt) -> str:
        """Reason why `prompt` did not arrive."""
        outcome = self.end(prompt).outcome
        assert isinstance(outcome, str) and prompt.has_ended
        return outcome

    def assert_read(self, theirs: Sequence[int], own: Sequence[int]) -> None:
        """Assert that these pages were read and no others were touched."""
        untouched = Place(500)
        source = dict(zip(own, theirs, strict=True))
        for page in range(PAGES + 1):
            want = self.there.page(source[page]) if page in source else untouched.page(page)
            assert torch.equal(self.here.page(page), want), page

    def assert_untouched(self) -> None:
        self.assert_read([], [])

    def given_up(self) -> str:
        """Reason for which the prompt was given up, as told to the desk."""
        heard: dict[int, str] = {}

        def is_heard() -> bool:
            heard.update(self.desk.take_given_up())
            return bool(heard)

        until(is_heard)
        return heard[ROOM].removeprefix("the decode server gave it up: ")

    def close(self) -> None:
        """End the threads and the desk."""
        self.mover.release()
        for prompt, thread in self.prompts:
            prompt.cancel()
            thread.join(10)
        self.desk.close()


class Server:
    """A prefill server of one rank, and the peer that a decode rank has of it."""

    def __init__(self, patience: Patience = PATIENT) -> None:
        self.scene = Scene()
        self.desk = self.scene.desk
        self.route = one_rank(self.scene.endpoint)
        self.look_ups: list[int] = []
        """Ranks that were looked up."""
        self.why: Exception | None = None
        """Error of look-ups."""
        self.news: deque[Contact] = deque()
        self._threads = CallThreads("disagg-peer")
        means = self.scene.means(patience, find_rank=self._find)
        self.peer = PrefillPeer("host", 1, means, self._threads, self.news)

    def _find(self, host: str, port: int, rank: int) -> Route:
        assert (host, port) == ("host", 1)
        self.look_ups.append(rank)
        if self.why is not None:
            raise self.why
        return msgspec.structs.replace(self.route, rank=rank)

    def meet(self, room: int = ROOM) -> Contact:
        return self.peer.meet(Bootstrap("host", 1, room))

    def restart(self) -> None:
        """Another instance takes the place of the prefill server, at another port."""
        self.desk.close()
        offer = self.scene.there.geometry.offer("another", self.scene.mover.get_session_id())
        self.desk = self.scene.desk = RoomDesk(offer, "127.0.0.1", unwanted_s=300, silent_s=300)
        self.route = one_rank(f"tcp://127.0.0.1:{self.desk.port}", "another")

    def through(self, proxy: ControlProxy) -> None:
        self.route = msgspec.structs.replace(self.route, endpoint=proxy.endpoint)

    def close(self) -> None:
        self.peer.close()
        self._threads.close()
        self.scene.close()
