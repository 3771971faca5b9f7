// Lets User Mode Linux 6.1 run on processors whose state is larger than it knows.
//
// It sets the floating point registers of its processes with a buffer of 2696 bytes: AVX-512 and
// protection keys. A host with more (AMX) refuses all but a whole buffer with EFAULT, and the kernel dies
// at its first process. This wraps its ptrace(2): what it does not know of stays as it is.
//
//   cc -shared -fPIC -o uml-xstate.so uml-xstate.c -ldl && LD_PRELOAD=$PWD/uml-xstate.so linux.uml ...
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

long ptrace(enum __ptrace_request request, ...)
{
	static long (*next)(enum __ptrace_request, ...);
	static _Alignas(64) char whole[1 << 16];
	struct iovec *given, all = {whole, sizeof whole};
	va_list args;

	va_start(args, request);
	int pid = va_arg(args, int);
	void *address = va_arg(args, void *), *data = va_arg(args, void *);
	va_end(args);
	if (!next)
		next = (long (*)(enum __ptrace_request, ...))dlsym(RTLD_NEXT, "ptrace");
	given = data;
	if (request != PTRACE_SETREGSET || (long)address != NT_X86_XSTATE ||
	    next(PTRACE_GETREGSET, pid, address, &all) != 0 || given->iov_len >= all.iov_len)
		return next(request, pid, address, data);
	memcpy(whole, given->iov_base, given->iov_len);
	return next(PTRACE_SETREGSET, pid, address, &all);
}
