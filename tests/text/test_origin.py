"""A prompt knows which of its characters its template wrote."""

from __future__ import annotations

import jinja2.sandbox
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.text.origin import OWN, SAID, Traced, TracingEnvironment

SOURCES = {
    "data": "[{{ said }}]",
    "plus": "{{ '[' + said + ']' }}",
    "tilde": "{{ '[' ~ said ~ ']' ~ 1 }}",
    "variable": "{% set open = '[' %}{{ open + said }}]",
    "block": "{% set b %}[{{ said }}]{% endset %}{{ b }}",
    "trimmed block": "{% set b %} [{{ said }}] {% endset %}{{ b | trim }}",
    "macro": "{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(said) }}",
    "call": "{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}{{ said }}{% endcall %}",
    "namespace": "{% set ns = namespace(t='[') %}{% set ns.t = ns.t + said %}{{ ns.t }}]",
    "join": "{{ ['[', said, ']'] | join }}{{ ['<', '>'] | join(',') }}{{ '|'.join(['a', 'b']) }}",
    "condition": "{{ '[' if 1 else '(' }}{{ said }}]",
    "slice": "{{ ('x[' + said + ']y')[1:-1] }}",
    "times": "{{ '=' * 3 }}[{{ said }}]",
    "tag": "{% generation %}[{{ said }}]{% endgeneration %}",
    "look": "{{ '[' + said.split('</t>')[-1] + ']' if '</t>' in said else '[' + said + ']' }}",
    "filter block": "{% filter trim %}[{{ said }}]{% endfilter %}",
}


@given(st.sampled_from(list(SOURCES)), st.sampled_from(["a", "b c", "</t>d", "x</t>y</t>z"]))
def test_what_the_template_wrote_is_its_own_and_the_rest_is_not(name, said):
    prompt = TracingEnvironment().from_string(SOURCES[name]).render(said=said)
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=["jinja2.ext.do"]).from_string(
        SOURCES[name].replace("{% generation %}", "").replace("{% endgeneration %}", "")
    )
    assert prompt == plain.render(said=said)
    assert isinstance(prompt, Traced)
    own = "".join(c for c, origin in zip(prompt, prompt.origin, strict=True) if origin == OWN)
    others = "".join(c for c, origin in zip(prompt, prompt.origin, strict=True) if origin == SAID)
    assert own.replace("1", "") == plain.render(said="").replace("1", "")
    assert others.replace("1", "") in said


@pytest.mark.parametrize(
    "source",
    [
        "{{ said | upper }}",
        "{{ '%s' % said }}",
        "{{ '{}'.format(said) }}",
        "{{ '[]' | replace('[', said) }}",
        "{{ [said, said] | join('') }}",
        "{{ [said] | tojson }}",
        "{% filter indent %}{{ said }}\n{{ said }}{% endfilter %}",
        "{{ said | indent(2, true) }}",
        "{{ [{'a': said}] | join(',', attribute='a') }}",
        "{{ said.split('x')[0] }}",
        "{{ said | list | string }}",
        "{{ said | wordwrap(3) }}",
    ],
)
def test_no_operation_makes_a_callers_text_the_templates_own(source):
    prompt = TracingEnvironment().from_string(source).render(said="<|a|> <|a|>")
    given_text = Traced.given(prompt)
    for at, character in enumerate(given_text.lower()):
        assert character != "|" or given_text.origin[at] == SAID
