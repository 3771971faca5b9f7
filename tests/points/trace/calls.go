package trace

import (
	"cmp"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// Call is a system call that is about to change something.
type Call struct {
	// Name of the call; of an ioctl(2) that of its request, too.
	Name string
	// Path that it is about, as far as that can be told.
	Path string
	// Exec: a child becomes another program.
	Exec bool
	// Argv are the arguments that it gets.
	Argv []string
	// Child: it is a call of a child of the process.
	Child bool
	// Talk is what is written to a pipe that is not the standard output or error: what the
	// process and a program that it has started have to say to each other. It changes nothing
	// that outlives them.
	Talk string
}

func (c Call) String() string {
	whose := ""
	if c.Child {
		whose = " (child)"
	}
	return fmt.Sprintf("%s %s%s", c.Name, c.Path, whose)
}

// Alike reports whether a call is one of many of which it does not matter much which one it is: of a program, or the same again to the same file.
func Alike(calls []Call, i int) bool {
	c := calls[i]
	return c.Child && !c.Exec || i > 0 && calls[i-1].Name == c.Name && calls[i-1].Path == c.Path
}

// How the arguments of a call tell whether it counts, and what it is about.
const (
	always  = iota // arg is not used: it always counts
	pathArg        // the argument with this index is a path
	fileArg        // it is a descriptor, and counts for regular files (also of sysfs and configfs), directories, block devices and fabrics
)

// fabrics is the character device by which NVMe over TCP is connected.
const fabrics = "/dev/nvme-fabrics"

// changing are the system calls that count; openat, openat2, open_tree, fsconfig, ioctl
// and io_submit are looked at more closely.
var changing = map[int]struct {
	name string
	how  int
	arg  int
}{
	unix.SYS_WRITE:           {"write", fileArg, 0},
	unix.SYS_PWRITE64:        {"pwrite64", fileArg, 0},
	unix.SYS_WRITEV:          {"writev", fileArg, 0},
	unix.SYS_PWRITEV:         {"pwritev", fileArg, 0},
	unix.SYS_PWRITEV2:        {"pwritev2", fileArg, 0},
	unix.SYS_SENDFILE:        {"sendfile", fileArg, 0},
	unix.SYS_SPLICE:          {"splice", fileArg, 2},
	unix.SYS_COPY_FILE_RANGE: {"copy_file_range", fileArg, 2},
	unix.SYS_FSYNC:           {"fsync", fileArg, 0},
	unix.SYS_FDATASYNC:       {"fdatasync", fileArg, 0},
	unix.SYS_SYNC_FILE_RANGE: {"sync_file_range", fileArg, 0},
	unix.SYS_SYNCFS:          {"syncfs", fileArg, 0},
	unix.SYS_FTRUNCATE:       {"ftruncate", fileArg, 0},
	unix.SYS_FALLOCATE:       {"fallocate", fileArg, 0},
	unix.SYS_RENAMEAT:        {"renameat", pathArg, 1},
	unix.SYS_RENAMEAT2:       {"renameat2", pathArg, 1},
	unix.SYS_UNLINKAT:        {"unlinkat", pathArg, 1},
	unix.SYS_MKDIRAT:         {"mkdirat", pathArg, 1},
	unix.SYS_MKNODAT:         {"mknodat", pathArg, 1},
	unix.SYS_LINKAT:          {"linkat", pathArg, 3},
	unix.SYS_SYMLINKAT:       {"symlinkat", pathArg, 2},
	unix.SYS_FCHMODAT:        {"fchmodat", pathArg, 1},
	unix.SYS_FSOPEN:          {"fsopen", pathArg, 0},
	unix.SYS_FSMOUNT:         {"fsmount", always, 0},
	unix.SYS_MOUNT_SETATTR:   {"mount_setattr", always, 0},
	unix.SYS_MOVE_MOUNT:      {"move_mount", always, 0},
	unix.SYS_MOUNT:           {"mount", pathArg, 1},
	unix.SYS_UMOUNT2:         {"umount2", pathArg, 0},
	unix.SYS_EXECVE:          {"execve", pathArg, 0},
	unix.SYS_EXECVEAT:        {"execveat", pathArg, 1},
}

// requests are the ioctl(2) requests that count: linux/loop.h, linux/fs.h, ext4.h,
// xfs_fs.h, btrfs.h.
var requests = map[uint32]string{
	0x4c00: "LOOP_SET_FD", 0x4c01: "LOOP_CLR_FD", 0x4c04: "LOOP_SET_STATUS64", 0x4c06: "LOOP_CHANGE_FD",
	0x4c07: "LOOP_SET_CAPACITY", 0x4c08: "LOOP_SET_DIRECT_IO", 0x4c0a: "LOOP_CONFIGURE",
	0x4c80: "LOOP_CTL_ADD", 0x4c81: "LOOP_CTL_REMOVE", 0x4c82: "LOOP_CTL_GET_FREE",
	0x40049409: "FICLONE", 0x4020940d: "FICLONERANGE", 0xc0045877: "FIFREEZE", 0xc0045878: "FITHAW",
	0x125d: "BLKROSET", 0x1261: "BLKFLSBUF", 0x1277: "BLKDISCARD", 0x127f: "BLKZEROOUT",
	0x40086610: "EXT4_IOC_RESIZE_FS", 0x4010586e: "XFS_IOC_FSGROWFSDATA", 0x50009403: "BTRFS_IOC_RESIZE",
	0x50009405: "BTRFS_IOC_FORGET_DEV",
}

// mapper are the requests to the device mapper that count: linux/dm-ioctl.h.
var mapper = map[uint32]string{
	0xc138fd03: "DM_DEV_CREATE", 0xc138fd04: "DM_DEV_REMOVE", 0xc138fd05: "DM_DEV_RENAME", 0xc138fd06: "DM_DEV_SUSPEND",
	0xc138fd09: "DM_TABLE_LOAD", 0xc138fd0a: "DM_TABLE_CLEAR", 0xc138fd0e: "DM_TARGET_MSG",
}

// inspect says what the call that a thread is about to make is, and whether it counts.
func inspect(tid, number int, args [6]uint64) (c Call, counts bool) {
	switch number {
	case unix.SYS_OPENAT, unix.SYS_OPENAT2:
		flags := args[2]
		if number == unix.SYS_OPENAT2 {
			flags = word(tid, args[2]) // open_how.flags
		}
		if flags&(unix.O_CREAT|unix.O_TRUNC) == 0 {
			return c, false
		}
		path := text(tid, args[1])
		// The locks of lvm2 go with their process; and what it saw last it takes as a hint.
		lvm := strings.HasPrefix(path, "/run/lock/lvm/") || strings.HasPrefix(path, "/run/lvm/")
		return Call{Name: "openat O_CREAT", Path: path}, !lvm
	case unix.SYS_OPEN_TREE:
		return Call{Name: "open_tree", Path: text(tid, args[1])}, args[2]&unix.OPEN_TREE_CLONE != 0
	case unix.SYS_FSCONFIG:
		return Call{Name: "fsconfig CREATE"}, args[1] == unix.FSCONFIG_CMD_CREATE
	case unix.SYS_IOCTL:
		if command, known := mapper[uint32(args[1])]; known {
			const nameAt, uuidAt = 48, 48 + 128 // struct dm_ioctl; one of them is given
			device := cmp.Or(text(tid, args[2]+nameAt), text(tid, args[2]+uuidAt))
			return Call{Name: "ioctl " + command, Path: device}, true
		}
		request, known := requests[uint32(args[1])]
		if !known {
			return c, false
		}
		_, name := behind(tid, args[0])
		return Call{Name: "ioctl " + request, Path: name}, true
	case unix.SYS_IO_SUBMIT:
		const pwrite, pwritev = 1, 8 // linux/aio_abi.h, of the first block of struct iocb: what, and to where
		what := word(tid, word(tid, args[2])+16)
		_, name := behind(tid, what>>32)
		return Call{Name: "io_submit pwrite", Path: name}, args[1] > 0 && (what&0xffff == pwrite || what&0xffff == pwritev)
	}
	known, found := changing[number]
	if !found {
		return c, false
	}
	c = Call{Name: known.name, Exec: number == unix.SYS_EXECVE || number == unix.SYS_EXECVEAT}
	switch known.how {
	case pathArg:
		c.Path = text(tid, args[known.arg])
		if number == unix.SYS_EXECVE {
			c.Argv = texts(tid, args[1])
		}
	case fileArg:
		mode, name := behind(tid, args[known.arg])
		if number == unix.SYS_WRITE && mode&unix.S_IFMT == unix.S_IFIFO && args[0] > 2 {
			c.Path, c.Talk = name, string(memory(tid, args[1], int(args[2])))
			return c, false
		}
		if kind := mode & unix.S_IFMT; kind != unix.S_IFREG && kind != unix.S_IFBLK && kind != unix.S_IFDIR && name != fabrics {
			return c, false
		}
		if c.Path = name; strings.HasPrefix(name, "/proc/") { // of another process, which goes with it
			return c, false
		}
	}
	return c, true
}
