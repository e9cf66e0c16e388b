"""What transformers sees: KVCache and ready-made ones (`cache`, `recipes`, `convert`), its layers (`layer`,
`sliding_layer`, `static_layer`, `native_layers`, `latent`) and what they share in a forward pass (`forward_pass`),
the attention and the masks (`attention`, `masks`), does a format suit a model's K (`format_check`), `.kvc` files
(`save_load`, `suspend`); what is done to a model (`backend`, `generate`, `compiled_generate`, `doctor`, `modules`,
`hub`)."""
