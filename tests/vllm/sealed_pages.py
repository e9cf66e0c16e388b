"""Inspects a running engine: full pages that its requests and its prefix cache can find have the computed contents."""

import torch

from kvcompress import ops

PAGE = 64


class Watch:
    """After each step, V of the first layer is read from every full page of every running request and compared; it is
    a function of the page's tokens. checked: number of pages; bad: (request, page) of wrong ones."""

    def __init__(self, llm):
        self.core = llm.llm_engine.engine_core.engine_core
        self.model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model.model
        self.layer = self.model.layers[0]
        attention = self.layer.self_attn.attn
        self.impl, self.checked, self.bad, self.known = attention.impl, 0, [], {}
        groups = self.core.scheduler.kv_cache_config.kv_cache_groups
        self.group = next(i for i, x in enumerate(groups) if attention.layer_name in x.layer_names)
        self.pages = groups[self.group].kv_cache_spec.block_size // PAGE
        update = self.core.scheduler.update_from_output

        def updated(*args, **keywords):
            result = update(*args, **keywords)
            self.look()
            return result

        self.core.scheduler.update_from_output = updated

    def expected(self, tokens):
        """V [tokens, heads * dim] of the first layer."""
        if (found := self.known.get(tuple(tokens))) is not None:
            return found
        hidden = self.layer.input_layernorm(self.model.embed_tokens(torch.tensor(tokens)))
        size = self.impl.num_kv_heads * self.impl.head_size
        return self.known.setdefault(tuple(tokens), self.layer.self_attn.qkv_proj(hidden)[0][:, -size:].float())

    def stored(self, page):
        heads, dim = self.impl.num_kv_heads, self.impl.head_size
        table, rows = torch.tensor([[[-1, self.impl.formats]]]), torch.tensor([[[PAGE, 0]]])
        none = torch.empty(0)
        _, v = ops.read(none, page.contiguous(), table, rows, none.int(), heads, dim, dim, PAGE, PAGE, 0)
        return v[0].transpose(0, 1).flatten(1)

    def look(self):
        scheduler = self.core.scheduler
        with torch.inference_mode():
            for request in scheduler.running:
                blocks = scheduler.kv_cache_manager.get_block_ids(request.request_id)[self.group]
                for i in range(request.num_computed_tokens // PAGE):
                    page = self.impl.cache[blocks[i // self.pages] * self.pages + i % self.pages]
                    wanted, got = self.expected(request.all_token_ids[i * PAGE :][:PAGE]), self.stored(page)
                    self.checked += 1
                    if not torch.cosine_similarity(got, wanted).min() > 0.9:
                        self.bad.append([request.request_id, i])
