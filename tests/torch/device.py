"""The device of these tests (device.cc), made known to torch as "testdev"."""

import torch
import weft_test_device

NAME = "testdev"
copies_take = weft_test_device.copies_take
is_idle = weft_test_device.is_idle


class Module:
    """What torch asks of torch.testdev."""

    device_count = staticmethod(weft_test_device.device_count)
    current_device = staticmethod(weft_test_device.current_device)
    set_device = staticmethod(weft_test_device.set_device)
    synchronize = staticmethod(weft_test_device.synchronize)

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def is_initialized():
        return True

    @staticmethod
    def _is_in_bad_fork():
        return False

    @staticmethod
    def manual_seed_all(seed):
        """It has no random numbers of its own."""


torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, Module)
torch.utils.generate_methods_for_privateuse1_backend()
