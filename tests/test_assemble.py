import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from sapo.assemble import keep_freed_memory
{call}
for i in range(40):  # it settles after some
    if i == 38:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)  # 64 MB, freed at once
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="malloc is told so on Linux only")
def test_freed_memory_is_used_again_without_page_faults():
    faults = []
    for call in ("", "keep_freed_memory()"):
        command = [sys.executable, "-c", FAULTS.format(call=call)]
        faults.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    default, kept = faults
    assert kept < 100 < default
