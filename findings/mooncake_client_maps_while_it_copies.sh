#!/usr/bin/env bash
# mooncake-transfer-engine-non-cuda 0.3.13.post1: shared memory is mapped while objects are copied.
#
# A stand-alone mooncake_client copies objects to the memory of an engine on the same host, which
# the engine has written already, and has registered.
# Expected: registering maps the memory in the client too; reads are as fast at first as later.
# Seen: the first read into each part takes a page fault for every 4 KiB, later ones take none. It
# moved 1.5 to 2.8 GB/s, later reads 6 to 12. That the engine has written, or pinned, the memory does
# not help. A put of one byte for each 64 KiB of the memory does: Linux maps pages around a fault.
#
# Exit status 0: as described. 1: this version behaves otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"; kill "${client:-}" "${master:-}" 2>/dev/null || true' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    mooncake-transfer-engine-non-cuda==0.3.13.post1
read -r rpc metrics port < <(python3 -c '
import socket
taken = [socket.socket() for _ in range(3)]
for one in taken: one.bind(("127.0.0.1", 0))
print(*(one.getsockname()[1] for one in taken))')
programs=$("$folder/venv/bin/python" -c '
import importlib.util
print(importlib.util.find_spec("mooncake").submodule_search_locations[0])')
listens() {
    until python3 -c "import socket; socket.create_connection(('127.0.0.1', $1), 1)" 2>/dev/null; do
        kill -0 "$2"
        sleep 0.2
    done
}
"$programs/mooncake_master" --rpc_address=127.0.0.1 --rpc_port="$rpc" \
    --metrics_host=127.0.0.1 --metrics_port="$metrics" >"$folder/master.log" 2>&1 &
master=$!
listens "$rpc" "$master"
MC_STORE_MEMCPY=1 "$programs/mooncake_client" --host=127.0.0.1 --port="$port" --threads=4 \
    --global_segment_size="512 MB" --local_buffer_size=0 --protocol=tcp \
    --metadata_server=P2PHANDSHAKE --master_server_address="127.0.0.1:$rpc" \
    >"$folder/client.log" 2>&1 &
client=$!
listens "$port" "$client"
"$folder/venv/bin/python" - "$port" "$client" 2>"$folder/engine.log" <<'PYTHON' | tee "$folder/out"
import ctypes
import sys
import time
from pathlib import Path

from mooncake.store import MooncakeDistributedStore, MooncakeHostMemAllocator

port, client = sys.argv[1:]
SIZE = 128 << 20
store = MooncakeDistributedStore()
assert store.setup_dummy(0, 16 << 20, f"127.0.0.1:{port}") == 0
allocator = MooncakeHostMemAllocator()


def memory():
    address = allocator.alloc(SIZE)
    ctypes.memset(address, 1, SIZE)
    assert store.register_buffer(address, SIZE) == 0
    return address


def faults():
    return int(Path(f"/proc/{client}/stat").read_text().rpartition(")")[2].split()[7])


def read(what, address):
    before, began = faults(), time.monotonic()
    assert store.batch_get_into_multi_buffers(["object"], [[address]], [[SIZE]]) == [SIZE]
    rate = SIZE / (time.monotonic() - began) / 1e9
    print(f"{what}: {faults() - before} faults, {rate:.1f} GB/s", flush=True)
    return faults() - before


source, plain, touched = memory(), memory(), memory()
assert store.batch_put_from_multi_buffers(["object"], [[source]], [[SIZE]]) == [0]
first, second = read("first read", plain), read("second read", plain)
places = list(range(touched, touched + SIZE, 64 << 10))
for start in range(0, len(places), 1024):
    part = places[start : start + 1024]
    codes = store.batch_put_from_multi_buffers([f"bytes-{start}"], [part], [[1] * len(part)])
    assert codes == [0]
after = read("first read after single bytes", touched)
raise SystemExit(not (first > 20_000 and second < 1_000 and after < 4_000))
PYTHON
