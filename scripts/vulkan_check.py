"""Build with Vulkan and run on it what devices are tested with: `make vulkan`.

On the GPU at hand; where there is none, on the CPU by Mesa's lavapipe, which ggml takes only by its
number. Rows, logits and a greedy text are compared with the CPU's. What is built lies beside the
normal build. Arguments are those of pytest, in place of the tests and the text.
"""

from __future__ import annotations

import os
import subprocess
import sys

from steps import ROOT, build_beside, run, say

TESTS = ("tests/native/test_device.py", "tests/library")
NAME_GPUS = "from pyh2o.library.devices import gpu_names; print(', '.join(gpu_names()))"
COMPARE_TEXT = """
import runpy, sys
from pyh2o.models import demo_model_path
sys.argv = ["gpu_logits.py", str(demo_model_path())]
runpy.run_path("scripts/gpu_logits.py", run_name="__main__")
"""


def main() -> int:
    say("build with Vulkan, the first time for an hour")
    python = [sys.executable, "-P"]
    try:
        package = build_beside(ROOT / "build" / "vulkan", "GGML_VULKAN=ON", {})
        os.environ |= {"PYTHONPATH": str(package), "NO_COLOR": "1"}
        os.environ.setdefault("GGML_VK_VISIBLE_DEVICES", "0")
        gpus = run([*python, "-c", NAME_GPUS], capture=True).strip()
        if not gpus:
            sys.exit("no driver of Vulkan is here: apt install mesa-vulkan-drivers")
        say(f"tests on {gpus}")
        run([*python, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *(sys.argv[1:] or TESTS)])
        if not sys.argv[1:]:
            say(f"a text on {gpus}")
            run([*python, "-c", COMPARE_TEXT])
    except subprocess.CalledProcessError:
        sys.exit("this failed, see above")
    return 0


if __name__ == "__main__":
    sys.exit(main())
