"""The HTTP server: OpenAI's and Anthropic's interfaces, receipts and a page, on one engine thread.

`api` are the types of requests, `core` makes engine requests of them and reads the events, one module per interface
writes answers, `guard` decides who may ask, `app` puts it all together and `run` serves it. Needs `verispec[server]`.
"""
