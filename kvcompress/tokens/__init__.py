"""Which slot of a layer holds which token: slots of tables and of what is kept (`slots`), slots that were never tokens
(`pads`), the last tokens of a window or a chunk (`ring`)."""
