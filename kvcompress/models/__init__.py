"""What is done to transformers' models: fused attention (`backend`), `generate` with our cache (`patching`), its
compiled steps on a GPU (`stepping`), what each layer gets and why (`diagnosis`), where attention is in a model
(`modules`), models by name (`hub`), which transformers will do (`versions`)."""
