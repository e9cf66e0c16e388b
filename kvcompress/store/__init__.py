"""Pages of one layer, independent of policies, tiers and models: on a device (`device_memory`, `copy_stream`), in pools
(`pools`), serialized (`serialize`); slots and tokens (`sequence`, `padding`, `window`); display of caches
(`display`)."""
