#pragma once

/// Marks a variable, or a function with static variables, of which a process has exactly one. Gives it
/// default visibility: otherwise each shared object built with -fvisibility=hidden, such as a Python
/// extension, would have its own. Two communicators constructed in two such objects would then get the same
/// name in the store, and the process would run two control planes.
///
/// An executable and the shared objects that it links have one instance in common. Objects that it loads by dlopen use
/// the same instance only if the executable exports its symbols (-rdynamic, CMake's ENABLE_EXPORTS). Among themselves,
/// objects loaded with RTLD_GLOBAL always have one instance in common, and objects loaded with RTLD_LOCAL do if GCC
/// compiled them. All of them must be built from one version of lockstep.
#define LOCKSTEP_PROCESS_WIDE [[gnu::visibility("default")]]

/// The inline namespace of what differs in programs with CUDA, and of the Trainer, which calls it: where objects with and without
/// CUDA are linked, each has its own. That of all names, v0_1, has the number of the version: objects of two versions that
/// pass a type of lockstep to each other do not link.
#ifdef LOCKSTEP_HAS_CUDA
#define LOCKSTEP_DEVICES with_cuda
#else
#define LOCKSTEP_DEVICES without_cuda
#endif

/// Marks the definitions in the `-inl.hpp` headers. In header-only use they are inline. With LOCKSTEP_COMPILED the
/// headers only declare the functions, and lockstep/compiled.cpp, which the program compiles once, defines them.
#ifdef LOCKSTEP_COMPILED
#define LOCKSTEP_INLINE
#else
#define LOCKSTEP_INLINE inline
#endif
