"""jinja2 as Hugging Face sets it up for chat templates, and able to run on traced texts."""

from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import do_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import Markup

from solotune.tokenizers.traced_text import (
    CLOSE,
    OPEN,
    Traced,
    joined,
    path_of,
    pieces_of,
    to_json,
)

# Filters that look at a text through its own methods only, so that a Path notes all they ask.
_NOTED_FILTERS = frozenset(
    "capitalize count d default dictsort first items join last length list lower map reject "
    "rejectattr replace safe select selectattr string title tojson trim upper".split()
)


class _CodeGenerator(CodeGenerator):
    def visit_Concat(  # noqa: N802 (jinja2's name)
        self, node: jinja2.nodes.Concat, frame: Frame
    ) -> None:
        """`a ~ b`, by the environment's `concat` instead of jinja2's own."""
        self.write("concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _CodeGenerator
    concat = staticmethod(joined)  # type: ignore[assignment]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` as a block that shows its body, between edges."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_block"), [], [], body).set_lineno(line)

    def _block(self, caller: Any) -> str:
        body = caller()
        return Traced.of((OPEN, *pieces_of(body), CLOSE), path_of(body))


def make_environment() -> ImmutableSandboxedEnvironment:
    """Block trimming, loop controls, unescaped `tojson`, `raise_exception`, `strftime_now`."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.filters["join"] = _join
    environment.filters["safe"] = lambda value: value if type(value) is Traced else Markup(value)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def notes_all(template: jinja2.nodes.Template) -> bool:
    """Whether all that a template can learn about a traced text is noted in its path.

    It is not where a plain text looks at a traced one: `'%s' % text`, `', '.join(texts)`,
    `text in 'constant'`, a filter of unknown working.
    """
    for node in template.find_all(jinja2.nodes.Filter):
        if node.name not in _NOTED_FILTERS:
            return False
    for node in template.find_all(jinja2.nodes.Mod):
        if not isinstance(node.right, jinja2.nodes.Const):
            return False
    for node in template.find_all(jinja2.nodes.Call):
        if isinstance(node.node, jinja2.nodes.Getattr | jinja2.nodes.Getitem) and isinstance(
            node.node.node, jinja2.nodes.Const
        ):
            return False
    for node in template.find_all(jinja2.nodes.Compare):
        for operand in node.ops:
            right = operand.expr.value if isinstance(operand.expr, jinja2.nodes.Const) else None
            if operand.op.endswith("in") and isinstance(right, str):  # `not in` too
                return False
    return True


@jinja2.pass_eval_context
def _join(eval_ctx: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
    items = list(value)
    if attribute is None and any(type(item) is Traced for item in items):
        parts = [part for item in items for part in (d, str(item))]
        return joined(parts[1:])
    return do_join(eval_ctx, items, d, attribute)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
