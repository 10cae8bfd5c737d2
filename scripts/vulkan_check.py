"""Build with Vulkan and run on it what devices are tested with: `make vulkan`.

On the GPU at hand; where there is none, on the CPU by Mesa's lavapipe, which ggml takes only by its
number. Rows and logits are compared with the CPU's. What is built lies beside the normal build.
Arguments are those of pytest; without any, the tests of devices, of tiny models.
"""

from __future__ import annotations

import os
import subprocess
import sys

from steps import ROOT, build_beside, run, say

TESTS = ("tests/native/test_device.py", "tests/library/test_devices.py")
# Tests (for pytest's -k) that fail with Mesa 22.3's lavapipe, for a cause that is not known.
LEFT_OUT = {
    "sliding_window": "flash attention of several tokens damages the heap, elsewhere seldom",
    "gpt_oss": "likewise",
}
NAME_GPUS = "from pyh2o.library.devices import gpu_names; print(', '.join(gpu_names()))"


def main() -> int:
    say("build with Vulkan, the first time for an hour")
    python = [sys.executable, "-P"]
    try:
        package = build_beside(ROOT / "build" / "vulkan", "GGML_VULKAN=ON", {})
        # sums in 16 bits are right for speed, and wrong for a comparison
        os.environ |= {"PYTHONPATH": str(package), "GGML_VK_DISABLE_F16": "1"}
        os.environ.setdefault("GGML_VK_VISIBLE_DEVICES", "0")
        gpus = run([*python, "-c", NAME_GPUS], capture=True).strip()
        if not gpus:
            sys.exit("no driver of Vulkan is here: apt install mesa-vulkan-drivers")
        say(f"tests on {gpus}")
        for name, reason in LEFT_OUT.items():
            print(f"left out: {name}: {reason}")
        left_out = ("-k", f"not ({' or '.join(LEFT_OUT)})")
        pytest = [*python, "-m", "pytest", "-p", "no:cacheprovider", "-rs"]
        run([*pytest, *(sys.argv[1:] or (*left_out, *TESTS))])
    except subprocess.CalledProcessError:
        sys.exit("this failed, see above")
    return 0


if __name__ == "__main__":
    sys.exit(main())
