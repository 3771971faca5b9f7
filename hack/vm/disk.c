// A disk whose cache goes with the power, for a User Mode Linux that has a loop device over a file of its host (hostfs):
//
//   cc -shared -fPIC -o uml-disk.so disk.c && LD_PRELOAD=$PWD/uml-disk.so VM_DISK=FILE VM_DISK_KEEPS=50 linux.uml ...
//
// What it writes to the file stays in the memory of its process until it flushes the device: SIGKILL loses it. Of each 100 writes VM_DISK_KEEPS (default 0)
// reach the file at once, at random; so later writes survive earlier ones. What is torn is torn between blocks of 4 KiB.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#define BLOCK 4096

static struct stat disk;
static int file = -1, keeps;
static char *now;	// the disk as the kernel sees it: a private mapping of the file
static char *unflushed; // for each block, whether it is in the mapping alone
static off_t *blocks;	// those that are, in the order in which they were written first
static size_t many;
static unsigned int seed;

__attribute__((constructor)) static void begin(void)
{
	const char *path = getenv("VM_DISK"), *share = getenv("VM_DISK_KEEPS");

	if (!path)
		return;
	if ((file = open(path, O_RDWR | O_CLOEXEC)) < 0 || fstat(file, &disk) != 0)
		abort();
	size_t all = disk.st_size / BLOCK;
	now = mmap(NULL, disk.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file, 0);
	unflushed = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	blocks = mmap(NULL, all * sizeof *blocks, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (now == MAP_FAILED || unflushed == MAP_FAILED || blocks == MAP_FAILED)
		abort();
	keeps = share ? atoi(share) : 0;
	seed = getpid();
}

static int is_disk(int fd)
{
	struct stat st;

	return file >= 0 && fstat(fd, &st) == 0 && st.st_dev == disk.st_dev && st.st_ino == disk.st_ino;
}

// The whole of a range of the disk: there is nothing beyond its end.
static ssize_t within(off_t at, size_t length)
{
	if (at >= disk.st_size)
		return 0;
	return length < (size_t)(disk.st_size - at) ? length : (size_t)(disk.st_size - at);
}

static int flush(void)
{
	for (size_t i = 0; i < many; i++) {
		off_t at = blocks[i] * BLOCK;

		if (syscall(SYS_pwrite64, file, now + at, BLOCK, at) != BLOCK)
			return -1;
		unflushed[blocks[i]] = 0;
	}
	if (many > 0)
		madvise(now, disk.st_size, MADV_DONTNEED); // the file has it all
	many = 0;
	return 0;
}

ssize_t pread64(int fd, void *to, size_t length, off64_t at)
{
	if (!is_disk(fd))
		return syscall(SYS_pread64, fd, to, length, at);
	ssize_t n = within(at, length);
	memcpy(to, now + at, n);
	return n;
}

ssize_t pwrite64(int fd, const void *from, size_t length, off64_t at)
{
	if (!is_disk(fd))
		return syscall(SYS_pwrite64, fd, from, length, at);
	ssize_t n = within(at, length);
	memcpy(now + at, from, n);
	if (keeps > 0 && rand_r(&seed) % 100 < keeps)
		return syscall(SYS_pwrite64, file, from, n, at);
	for (off_t s = at / BLOCK; s * BLOCK < at + n; s++)
		if (!unflushed[s]) {
			unflushed[s] = 1;
			blocks[many++] = s;
		}
	return n;
}

int fsync(int fd) { return is_disk(fd) ? flush() : syscall(SYS_fsync, fd); }

int fdatasync(int fd) { return is_disk(fd) ? flush() : syscall(SYS_fdatasync, fd); }

// Blocks that are discarded or zeroed are so for good, and all that was written before them is there.
int fallocate64(int fd, int mode, off64_t at, off64_t length)
{
	if (is_disk(fd) && flush() != 0)
		return -1;
	int result = syscall(SYS_fallocate, fd, mode, at, length);
	if (result == 0 && is_disk(fd))
		madvise(now, disk.st_size, MADV_DONTNEED);
	return result;
}
