"""Fixtures of the data tests. Knows no model."""

import pytest
from tokenizers import AddedToken

# ChatML in the manner of Qwen3.5: trims every turn, opens a closed think block for the answer to the last question
# only, accepts a system turn at the start only.
THINKING_TEMPLATE = """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if ns.last < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
    {{- message.content | trim + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% else %}{{ '<think>\n' }}{% endif %}
{%- endif %}
"""


@pytest.fixture
def thinking_tokenizer(tiny_tokenizer):
    """The tiny tokenizer with think tags and a template that treats them as Qwen3.5's does."""
    tiny_tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    tiny_tokenizer.chat_template = THINKING_TEMPLATE
    return tiny_tokenizer
