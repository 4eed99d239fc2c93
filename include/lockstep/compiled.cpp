// The functions that the headers only declare where LOCKSTEP_COMPILED is defined, and the templates of
// train/detail/instantiations.hpp. A program that defines it compiles this file once; the CMake target lockstep::compiled does both.
#ifndef LOCKSTEP_COMPILED
#define LOCKSTEP_COMPILED
#endif
#define LOCKSTEP_INSTANTIATES

#include "lockstep/comm/detail/agreement-inl.hpp"
#include "lockstep/comm/detail/gloo_comm-inl.hpp"
#include "lockstep/comm/detail/process_group_comm-inl.hpp"
#include "lockstep/comm/detail/shm_comm-inl.hpp"
#include "lockstep/detail/files-inl.hpp"
#include "lockstep/detail/format-inl.hpp"
#include "lockstep/detail/json-inl.hpp"
#include "lockstep/grad/detail/model-inl.hpp"
#include "lockstep/interchange/detail/state_dict-inl.hpp"
#include "lockstep/log/detail/log-inl.hpp"
#include "lockstep/report/detail/append_file-inl.hpp"
#include "lockstep/report/detail/metrics_files-inl.hpp"
#include "lockstep/report/detail/run_recorder-inl.hpp"
#include "lockstep/report/detail/tensorboard-inl.hpp"
#include "lockstep/report/detail/trace_recorder-inl.hpp"
#include "lockstep/train/detail/instantiations.hpp"
#include "lockstep/train/detail/optimizer_check-inl.hpp"
#include "lockstep/world/detail/launch-inl.hpp"
#include "lockstep/world/detail/world-inl.hpp"
#include "lockstep/world/detail/world_state-inl.hpp"
#if __has_include(<nlohmann/json.hpp>)
#include "lockstep/interchange/detail/safetensors-inl.hpp"
#endif
