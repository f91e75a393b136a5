"""`nanotrain checkpoint export-megatron`: a run goes on in Megatron-LM."""

from collections.abc import Sequence

from nanotrain.cli.addresses import read_path, show, written_path
from nanotrain.cli.parser import CommandParser
from nanotrain.cli.values import count


def export_megatron(argv: Sequence[str]) -> int:
    """Write a checkpoint for Megatron-LM (torch_dist), with the optimizer's state."""
    parser = CommandParser("checkpoint export-megatron", export_megatron)
    parser.add_argument(
        "path", type=read_path, help="step folder, or run folder for its newest step"
    )
    parser.add_argument(
        "output", type=written_path, help="the folder to write, for --load of Megatron-LM"
    )
    parser.add_argument(
        "--dtype",
        choices=["fp32", "bf16", "fp16"],
        default="fp32",
        help="data type of the weights (default: fp32); state of the optimizer is fp32",
    )
    parser.add_argument("--no-optim", action="store_true", help="weights alone")
    parser.add_argument(
        "--optim-form",
        choices=["fused", "torch"],
        default="fused",
        help="the Adam that loads the state without a distributed optimizer: FusedAdam of "
        "transformer-engine or Apex, or torch.optim.AdamW (default: fused)",
    )
    parser.add_argument(
        "--expert-model-parallel-size",
        type=count,
        help="that of the run that loads the state: experts have an optimizer of their own there "
        "if it is more than 1 (default: that of the checkpoint's run)",
    )
    args = parser.parse_args(argv)
    from nanotrain.interop.megatron.export_run import export_megatron as export
    from nanotrain.interop.megatron.export_state import StateOptions

    options = StateOptions(args.expert_model_parallel_size, args.optim_form == "torch")
    text = export(
        args.path, args.output, dtype=args.dtype, optim=not args.no_optim, options=options
    )
    show(text)
    return 0
