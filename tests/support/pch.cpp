// Compiled only so that the precompiled header exists.
