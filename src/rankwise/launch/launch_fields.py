"""The fields of torchrun's `LaunchConfig`, from the table of options.

A field that an option gives its value has the option's type, default and help, where it has no own
ones. The others have their own.
"""

from typing import Any

from rankwise.launch.options import OPTIONS, SAME, Option


class LaunchField:
    """A field of torchrun's `LaunchConfig`.

    Attributes:
        name: the field's.
        help: its line in the docstring.
        option: the option that gives the field its value; empty if none does so alone.
        type: its annotation, as source text.
        default: its value if it is not given.
        is_required: whether it has no default.
        is_dictionary: whether its default is a new dictionary.
    """

    def __init__(
        self,
        name: str,
        *,
        help: str,  # noqa: A002  # what it is
        type: str,  # noqa: A002  # the same
        option: str = "",
        default: Any = SAME,
        is_required: bool = False,
        is_dictionary: bool = False,
    ) -> None:
        # One of the three says what a field is that is not given; `...` would become its value.
        if (default is not SAME) + is_required + is_dictionary != 1:
            raise TypeError(f"field {name} needs a default, or to be required, or a dictionary")
        self.name = name
        self.help = help
        self.option = option
        self.type = type
        self.default = default
        self.is_required = is_required
        self.is_dictionary = is_dictionary


_ROWS = {row.name: row for row in OPTIONS}


def field_of(
    name: str,
    *,
    option: str = "",
    note: str = "",
    type: str = "",  # noqa: A002  # what it is
    default: Any = SAME,
) -> LaunchField:
    """Make a field of an option's row.

    Args:
        name: the field's.
        option: the option's name, if it is another.
        note: what the field's help says besides.
        type: its annotation, if it is not the option's.
        default: its default, if it is neither torchrun's nor the option's.

    Raises:
        TypeError: torchrun has no such option.
    """
    row: Option | None = _ROWS.get(option or name)
    if row is None or row.torchrun is None:
        raise TypeError(f"field {name}: torchrun has no option {option or name}")
    defaults = (default, row.torchrun.default, row.initial)
    text = row.torchrun.help or row.help
    return LaunchField(
        name,
        help=f"{text} {note}" if note else text,
        option=row.name,
        type=type or row.type,
        default=next(each for each in defaults if each is not SAME),
    )


LAUNCH_FIELDS: tuple[LaunchField, ...] = (
    LaunchField("min_nodes", help="The least number of nodes.", type="int", is_required=True),
    LaunchField("max_nodes", help="The largest number of nodes.", type="int", is_required=True),
    LaunchField("nproc_per_node", help="Workers on each node.", type="int", is_required=True),
    LaunchField(
        "logs_specs",
        help="Where the workers' output goes; by default to the console.",
        type="LogsSpecs | None",
        default=None,
    ),
    field_of("run_id", option="rdzv_id", note="A random one if empty.", default=""),
    field_of("role", default="default_role"),
    field_of("rdzv_endpoint"),
    field_of("rdzv_backend", default="etcd"),
    LaunchField(
        "rdzv_configs",
        help="Settings of the rendezvous.",
        type="dict[str, Any]",
        is_dictionary=True,
    ),
    LaunchField(
        "rdzv_timeout",
        help='Seconds to wait for the other nodes; -1 leaves it to `rdzv_configs["timeout"]`.',
        type="int",
        default=-1,
    ),
    field_of("max_restarts", default=3),
    field_of("monitor_interval"),
    field_of("start_method"),
    LaunchField(
        "log_line_prefix_template",
        help="See `LocalElasticAgent`.",
        type="str | None",
        default=None,
    ),
    LaunchField(
        "metrics_cfg",
        help="The argument of `metrics.initialize_metrics`.",
        type="dict[str, str]",
        is_dictionary=True,
    ),
    field_of("local_addr"),
    field_of("event_log_handler"),
    LaunchField("numa_options", help="Torch's `NumaOptions`.", type="Any", default=None),
    field_of("signals_to_handle"),
    field_of("duplicate_stdout_filters", type="list[str] | None", default=None),
    field_of("duplicate_stderr_filters", type="list[str] | None", default=None),
    field_of("virtual_local_rank"),
    field_of(
        "shutdown_timeout",
        note="In seconds; by default TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or 30.",
        type="int | None",
    ),
)
"""In torch's order, which is that of positional arguments."""
