"""The kernel compiled for three GPUs without one: 16-byte accesses, and what it needs.

In a process without ``TRITON_INTERPRET``, since a kernel is one or the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="kernels need triton")

PROGRAM = r"""
import json, re, subprocess, sys, tempfile
import triton
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvpolicy_cuda._kernel import copy_boxes
from kvpolicy_cuda.kernels import WARPS, tile_of

signature = {}
for parameter in copy_boxes.params:
    kind = "constexpr" if parameter.is_constexpr else parameter.annotation_type
    signature[parameter.name] = kind or "*i64"
cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
found = []
for arch in (80, 90, 100):
    for unit, size in ((16, 1024), (16, 2**20), (16, 32), (8, 264), (4, 260)):
        for to_host in (True, False):
            tile = tile_of(size, unit)
            constants = {"TO_HOST": to_host, "UNIT": unit, "RUNS": tile.runs, "WORDS": tile.words}
            options = {"num_warps": WARPS, "num_stages": 1, "enable_fp_fusion": True}
            made = triton.compile(
                ASTSource(copy_boxes, signature, constants),
                target=GPUTarget("cuda", arch, 32),
                options=options,
            )
            text = made.asm["ptx"]
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(made.asm["cubin"])
                file.flush()
                said = subprocess.run(
                    [cuobjdump, "--dump-resource-usage", file.name],
                    capture_output=True, text=True, check=True,
                ).stdout
            used = {name: int(n) for name, n in re.findall(r"([A-Z]+):(\d+)", said)}
            found.append({
                "arch": arch, "unit": unit, "size": size, "to_host": to_host,
                "loads": sorted(set(re.findall(r"ld\.global\.(\S+)", text))),
                "stores": sorted(set(re.findall(r"st\.global\.(\S+)", text))),
                "registers": used["REG"], "spilled": used["LOCAL"] + used["STACK"],
                "shared": used["SHARED"] + made.metadata.shared,
            })
json.dump(found, sys.stdout)
"""

LAUNCHES = r"""
import json, sys
import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from kvpolicy_cuda._kernel import copy_boxes
from kvpolicy_cuda.kernels import Kernels
from kvpolicy_cuda.runs import KernelBox


class NoGpu:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class Compiled:
    def __getitem__(self, grid):
        return lambda *given, **more: made.append(copy_boxes.warmup(*given, grid=grid, **more))


made = []
triton.runtime.driver.set_active(NoGpu())
kernels = Kernels(Compiled())
for pairs in (1, 7, 16, 2**20):
    for stride, base in ((64, 2**40), (2**33 + 64, 2**47 + 64), (1, 2**30)):
        box = KernelBox(
            bases=np.array([base, 64]), offsets=np.array([pairs, 0]),
            block_stride=stride, size=1024,
            times=(1, 1, pairs % 5 + 1, 16), device_strides=(0, 0, stride, 2048),
            host_strides=(0, 0, 128, stride),
        )
        ids = torch.zeros(2, pairs, dtype=torch.int64)
        kernels.copy(box, *ids, ids[:, :1], host=base, row_stride=stride, unit=16, to_host=True)
json.dump({
    "launches": len(made), "kernels": sorted({one.hash for one in made}),
    "signature": made[0].src.signature,
}, sys.stdout)
"""


def in_its_own_process(program, cache):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return in_its_own_process(PROGRAM, tmp_path_factory.mktemp("triton"))


def test_a_launch_compiles_once_whatever_is_copied(tmp_path):
    """Through the arguments of a real launch, up to where a GPU would be asked."""
    found = in_its_own_process(LAUNCHES, tmp_path)
    assert found["launches"] == 12
    assert len(found["kernels"]) == 1
    # The interpreter takes numbers as they are; on a GPU these would wrap at 2**31 if they had 32
    # bits, and every product with them.
    wide = [name for name in found["signature"] if name.startswith(("device_", "host"))]
    for name in (*wide, "block_stride", "row_stride"):
        assert found["signature"][name] == "i64", name
    assert len(wide) == 9


def test_it_compiles_for_every_target(compiled):
    assert {one["arch"] for one in compiled} == {80, 90, 100}
    assert len(compiled) == 3 * 5 * 2


def test_accesses_are_as_wide_as_the_alignment_allows(compiled):
    width = {16: {"v2.b64"}, 8: {"b64"}, 4: {"b32"}}
    for one in compiled:
        assert set(one["stores"]) == width[one["unit"]], one
        # The ids, 8 bytes each, are loaded too.
        assert set(one["loads"]) == width[one["unit"]] | {"b64"}, one


def test_it_needs_no_memory_but_registers(compiled, capsys):
    lines = [
        f"  sm_{one['arch']} {'store' if one['to_host'] else 'load':5} of {one['size']:>9,} B by "
        f"{one['unit']:>2} B: {one['registers']:>3} registers, {one['spilled']} B spilled, "
        f"{one['shared']} B shared"
        for one in compiled
    ]
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(lines) + "\n")
    for one in compiled:
        assert one["spilled"] == 0, one
        assert one["shared"] == 0, one
        assert one["registers"] <= 128, one  # all of a thread block's fit a processor
