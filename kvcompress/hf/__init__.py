"""Integration with transformers: KVCache (`cache`, `recipes`, `convert`), its layers (`layer`, `sliding_layer`,
`static_layer`, `native_layers`, `latent`) and the state that they share in a forward pass (`forward_pass`), attention
and masks (`attention`, `masks`), checks of formats (`format_check`), `.kvc` files (`save_load`, `suspend`), and models
(`backend`, `generate`, `compiled_generate`, `doctor`, `modules`, `hub`)."""
