#pragma once

#include <c10/core/Device.h>

#include <concepts>
#include <type_traits>

namespace lockstep {

/// A part of a training step that a graph can hold and repeat: it says so by a `static constexpr bool
/// capturable = true`.
///
/// 1. It reads no value of the device on the host: what it decides, it decides on the device.
/// 2. Its operators, shapes and memory are the same in every step, but for memory that it takes and gives
///    back inside of the step.
/// 3. What changes from step to step (a rate, a scale, a count) it keeps in tensors and changes in place. The
///    host's own code runs once, when the step is captured.
///
/// Where that depends on options, its `check_capturable()` throws UsageError that says on which. A
/// communicator may have `watch_replay(replay)`, which calls `replay()` once unless it has failed, and sees
/// that what is repeated ends: each replay goes through it.
template <class T>
concept Capturable = requires {
  requires bool(std::remove_cvref_t<T>::capturable);
};

/// What records a step and repeats it. The caller's stream is the one that is current where it calls.
///
/// 1. `on_stream(f)` calls `f()` with the graph's own stream as the current one. What that is given comes
///    after what the caller's stream was given before, and before what it is given next; the host does not
///    wait.
/// 2. `capture(f)` calls `f()` once, as on_stream does, but what the stream is given is recorded and not
///    done. Only this thread is part of that: others, such as a watchdog or a loader, go on as ever. Where
///    `f` throws, the recording is dropped and the exception goes on.
/// 3. `replay()` gives the caller's stream all that was recorded, with the same memory.
/// 4. `device()` is where it works.
template <class G>
concept StepGraph = std::movable<G> && requires(G& graph, const G& seen, void (*function)()) {
  graph.on_stream(function);
  graph.capture(function);
  graph.replay();
  { seen.device() } -> std::same_as<c10::Device>;
};

}  // namespace lockstep
