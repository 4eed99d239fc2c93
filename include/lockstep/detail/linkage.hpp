#pragma once

/// Precedes a variable, or a function with static variables, that a process has once. Default visibility: of
/// shared objects built with -fvisibility=hidden, as Python's extensions are, each would have its own, so
/// that communicators made in two of them had the same names in the store, and a process had two failure
/// monitors.
///
/// An executable shares its own with objects that it links. With objects that it loads (dlopen), it does
/// where it exports its symbols (-rdynamic, CMake's ENABLE_EXPORTS); objects loaded with RTLD_LOCAL share
/// with each other where GCC has compiled them, and with RTLD_GLOBAL always. All of them are built from one
/// version of lockstep.
#define LOCKSTEP_PROCESS_WIDE [[gnu::visibility("default")]]

/// Precedes the definitions in the `-inl.hpp` headers. Header-only, each of them is inline. With
/// LOCKSTEP_COMPILED, headers only declare, and lockstep/compiled.cpp, which the program compiles once,
/// defines.
#ifdef LOCKSTEP_COMPILED
#define LOCKSTEP_INLINE
#else
#define LOCKSTEP_INLINE inline
#endif
