"""The reference engine as processes: workers that compute, and an OpenAI-compatible front.

=========  ================================================================
backend    what a front needs: a job in, tokens out
thread     a backend in this process: the engine on a thread of its own
worker     an engine behind HTTP, for other processes of ours
router     a backend made of such workers, some for prompts, some for answers
openai     the HTTP API that clients know
chat       messages to tokens, tokens to text
serve      a process put together from these
=========  ================================================================
"""
