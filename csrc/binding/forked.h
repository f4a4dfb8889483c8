// What a process can no longer do after it was forked.
#pragma once

namespace ftbert::binding {

// On the CPU, at the begin of every call: in a process that was forked from one that had loaded the library, the
// calling thread starts no others, in the kernels and in the libraries that they call. OpenMP's threads stayed with the
// parent, while its pool is remembered: whoever asks it for work waits for ever. Warns once where that takes threads
// from it.
void one_thread_if_forked();

}  // namespace ftbert::binding
