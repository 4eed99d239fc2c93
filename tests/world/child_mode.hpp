#pragma once

/// What this test program does as a child of its own tests.
namespace lockstep_test {
int child_mode(const char* mode, int argc, char** argv);
}
