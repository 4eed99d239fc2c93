#pragma once
#pragma GCC system_header  // for #include_next

// The real nccl.h with a configuration of fewer members, as an older version has it.
#include_next <nccl.h>

struct OlderNcclConfig {
  size_t size;
  unsigned int magic, version;
  int blocking, cgaClusterSize, minCTAs, maxCTAs;
  const char* netName;
  int splitShare;
};
#define ncclConfig_t OlderNcclConfig
#undef NCCL_CONFIG_INITIALIZER
#define NCCL_CONFIG_INITIALIZER \
  { sizeof(OlderNcclConfig) }
