// LD_PRELOAD this and a program sees an x86-64 CPU without AVX-512 and AMX, whatever library asks: options of the
// libraries themselves reach only part of some (OpenVINO's ONEDNN_MAX_CPU_ISA). Linux, on CPUs that let cpuid fault.
// What the loader chose before this is in place, as for memcpy, stays.
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

// This thread's cpuid faults, and that of threads and processes that it starts, until they run another program.
static long set_faults(int on) { return syscall(SYS_arch_prctl, 0x1012 /* ARCH_SET_CPUID */, !on); }

static uint32_t without(uint32_t word, int count, const int* bits) {
  for (int i = 0; i < count; ++i) word &= ~(1u << bits[i]);
  return word;
}
#define WITHOUT(word, ...) \
  without(word, sizeof((int[]){__VA_ARGS__}) / sizeof(int), (const int[]){__VA_ARGS__})

static void answer(int number, siginfo_t* info, void* context) {
  (void)info;
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  const uint8_t* instruction = (const uint8_t*)registers[REG_RIP];
  if (instruction[0] != 0x0f || instruction[1] != 0xa2) {  // no cpuid: a fault of the program's own
    signal(number, SIG_DFL);
    return;
  }
  const uint32_t leaf = registers[REG_RAX], part = registers[REG_RCX];
  uint32_t a, b, c, d;
  set_faults(0);
  __cpuid_count(leaf, part, a, b, c, d);
  set_faults(1);
  if (leaf == 7 && part == 0) {  // AVX512: F DQ IFMA PF ER CD BW VL; VBMI VBMI2 VNNI BITALG VPOPCNTDQ; ...; AMX
    b = WITHOUT(b, 16, 17, 21, 26, 27, 28, 30, 31);
    c = WITHOUT(c, 1, 6, 11, 12, 14);
    d = WITHOUT(d, 2, 3, 8, 22, 23, 24, 25);
  }
  if (leaf == 7 && part == 1) {  // AVX_VNNI AVX512_BF16 AMX_FP16 AVX_IFMA; AVX10
    a = WITHOUT(a, 4, 5, 21, 23);
    d = WITHOUT(d, 19);
  }
  if (leaf == 0x0d && part == 0) a = WITHOUT(a, 5, 6, 7, 17, 18);  // their registers
  if (leaf == 0x24) a = b = c = d = 0;                             // AVX10
  registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
  registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void hide(void) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = answer;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  if (sigaction(SIGSEGV, &action, NULL) || set_faults(1)) {
    fprintf(stderr, "hide_avx512: this CPU or kernel does not let cpuid fault\n");
    exit(1);
  }
}
