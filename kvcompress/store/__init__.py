"""Pages of one layer, without a policy, a tier or a model: on a device (`device_memory`, by way of a `copy_stream`),
in pools (`pools`), in one piece of bytes (`serialize`); which slot holds which token (`sequence`, `padding`,
`window`); what a cache looks like (`display`)."""
