"""KVCache, the pages' face for transformers: the cache and ready-made ones (`cache`, `recipes`, `convert`), its layers
(`paged`, `sliding`, `static`, `foreign`, `folding`) and what they share in a forward pass (`shared`), the attention and
the masks that read them (`attention`, `masks`), `.kvc` files and suspension (`files`, `suspending`)."""
