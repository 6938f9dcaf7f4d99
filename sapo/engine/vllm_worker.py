"""What runs inside vLLM's own processes, by its `worker_extension_cls`."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time

WATCH_S = 1.0


class EndWithTrainer:
    """Ends the processes of an engine whose trainer was killed, which otherwise stay for ever and hold their memory."""

    def end_with(self, pid: int, folder: str) -> None:
        """End this process and its parent that drives it, and delete the folder, once there is no process `pid`."""
        threading.Thread(target=wait_and_exit, args=(pid, folder), daemon=True).start()


def wait_and_exit(pid: int, folder: str) -> None:
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
            driver = multiprocessing.parent_process()  # on a GPU the worker is in the driver, a child of `pid`
            if driver is not None and driver.pid != pid:
                os.kill(driver.pid, signal.SIGKILL)
            os._exit(1)
        time.sleep(WATCH_S)
