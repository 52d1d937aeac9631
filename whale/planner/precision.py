"""The precision that the settings ask for, as the plan says it.

Place in the flow: read by `make_plan` and, before there is a plan, by `wh.parallelize`: a model is
captured as it will compute.
"""

from __future__ import annotations

from whale.config import Config
from whale.ir.precision import Precision

FIRST_SCALE = 65536.0
"""Where a dynamic scale begins, as torch's does."""


def precision_of(config: Config) -> Precision:
    """Of `amp.*`. Without float16 there is no scale: bfloat16 reaches as far as float32."""
    amp = config.amp
    if not amp.level:
        return Precision()
    scale, dynamic = 0.0, False
    if amp.dtype == "float16":
        dynamic = amp.loss_scale == "dynamic"
        scale = FIRST_SCALE if dynamic else float(amp.loss_scale)
    if amp.level == "O1":
        return Precision(autocast=amp.dtype, loss_scale=scale, dynamic=dynamic)
    return Precision(
        parameters=amp.dtype,
        master=amp.master,
        gradients=amp.gradients,
        loss_scale=scale,
        dynamic=dynamic,
    )
