# Run by ctest: builds the API reference with DOXYGEN and the Doxyfile in FOLDER, which fails at any warning, and lists what has no
# comment. Classes, concepts, enums and functions at namespace scope need one; a deduction guide is no function, nor is a macro of
# LibTorch, and the options of a class are named after it. Members of classes need one as well, unless
#   - a comment of their header names them (`name`), or the comment before their declaration holds for several of them;
#   - they are one of `stated`: members of a concept, which states their contract, or of iterators, and options of Python's name;
#   - the language declares them: operators, copies, moves, constructors, and overriders.
cmake_minimum_required(VERSION 3.25)
execute_process(COMMAND ${DOXYGEN} ${FOLDER}/Doxyfile RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(NOT result EQUAL 0 OR output MATCHES "warning:|error:")
  message("${output}")
  message(FATAL_ERROR "the API reference has faults, listed above")
endif()
file(GLOB pages ${FOLDER}/html/*lockstep*.html)
list(LENGTH pages count)
if(count LESS 200)
  message(FATAL_ERROR "the reference has ${count} pages only: Doxygen has not found the headers")
endif()

file(READ ${FOLDER}/Doxyfile settings)
file(WRITE ${FOLDER}/Doxyfile.undocumented "${settings}
EXTRACT_ALL = NO
WARN_IF_UNDOCUMENTED = YES
WARN_AS_ERROR = NO
OUTPUT_DIRECTORY = ${FOLDER}/undocumented
")
execute_process(COMMAND ${DOXYGEN} ${FOLDER}/Doxyfile.undocumented OUTPUT_VARIABLE output ERROR_VARIABLE output)
string(REPLACE ";" "," output "${output}")
string(REPLACE "\n" ";" lines "${output}")
set(stated
  # Communicator, AsyncWork
  rank size world world_rank Work wait synchronize error all_reduce reduce broadcast reduce_scatter all_gather all_to_all
  all_gather_bytes broadcast_bytes barrier barrier_async abort shutdown tensor_device new_group check_error label
  # CommunicationHook, StatefulHook
  start name wire_bytes settings state load_state rollback reset shared_state predivides propagates_nan ranks_diverge
  # Precision, Checkpointed, Sampler and torch::data's samplers
  forward scale step forget save load next read_order pass_epoch begun resumes draws_base_seed
  # The extras and callbacks of a Trainer; the state of an optimizer
  make_optimizer rate_factor watch begin_step check on_gradients on_step on_profile on_epoch_start on_epoch
  each_field each_tensor Group _check_input_dim
  # Ranges and iterators
  Batch begin end value_type difference_type iterator_concept
  # Options of optimizers and schedules
  lr momentum dampening weight_decay nesterov maximize betas eps amsgrad factor total_iters start_factor end_factor T_max power
  step_size gamma milestones milestone)
set(members 0)
set(faults 0)
foreach(line IN LISTS lines)
  if(line MATCHES "^([^:]+):[0-9]+: warning: Member (.*) \\([a-z]+\\) of (class|struct|concept) ([A-Za-z0-9_:]*)")
    set(header ${CMAKE_MATCH_1})
    set(signature "${CMAKE_MATCH_2}")
    string(REGEX REPLACE ".*::" "" class "${CMAKE_MATCH_4}")
    string(REGEX REPLACE "\\(.*" "" member "${signature}")
    math(EXPR members "${members} + 1")
    if(member IN_LIST stated OR member STREQUAL class OR signature MATCHES "^operator| override$")
      continue()
    endif()
    if(NOT member STREQUAL class AND signature MATCHES "^[A-Z][A-Za-z]*\\(")
      continue()  # a constructor of a base class
    endif()
    file(READ ${header} text)
    if(text MATCHES "///[^\n]*`${member}[^a-zA-Z0-9_]" OR text MATCHES "///[^\n]*\n[^\n(]*[ ,]${member}( = [^,;\n]*)?[,;]")
      continue()
    endif()
    message("${line}")
    math(EXPR faults "${faults} + 1")
  elseif(line MATCHES "is not documented" AND NOT line MATCHES " -> |TORCH_MODULE|Compound lockstep::[A-Za-z]+Options ")
    message("${line}")
    math(EXPR faults "${faults} + 1")
  endif()
endforeach()
message("${count} pages; ${members} members of classes have no comment of their own, but a stated contract")
if(faults GREATER 0)
  message(FATAL_ERROR "${faults} public names, listed above, have no comment")
endif()
