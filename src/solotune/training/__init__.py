"""What a recipe's loop needs around the arithmetic: device, precision, schedule, progress, log."""

from solotune.training.checks import check_positive as check_positive
from solotune.training.clipping import clip_grad_norm as clip_grad_norm
from solotune.training.device import describe_device as describe_device
from solotune.training.device import pick_device as pick_device
from solotune.training.device import set_seed as set_seed
from solotune.training.freezing import freeze as freeze
from solotune.training.metric_loggers import CSVLogger as CSVLogger
from solotune.training.metric_loggers import TensorBoardLogger as TensorBoardLogger
from solotune.training.metric_loggers import WandBLogger as WandBLogger
from solotune.training.precision import parameter_lines as parameter_lines
from solotune.training.precision import pick_dtype as pick_dtype
from solotune.training.precision import set_dtype as set_dtype
from solotune.training.profiling import StepProfiler as StepProfiler
from solotune.training.progress import Progress as Progress
from solotune.training.progress import check_finite as check_finite
from solotune.training.progress import check_weights as check_weights
from solotune.training.progress import is_due as is_due
from solotune.training.progress import step_lines as step_lines
from solotune.training.progress import stop_on_signals as stop_on_signals
from solotune.training.run_log import RunLog as RunLog
from solotune.training.run_log import peak_bytes as peak_bytes
from solotune.training.run_log import pick_output_dir as pick_output_dir
from solotune.training.schedule import constant as constant
from solotune.training.schedule import cosine as cosine
from solotune.training.schedule import linear as linear
from solotune.training.schedule import set_lr as set_lr
