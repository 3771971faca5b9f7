package nvme

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/ioctl"
)

// answerTime is how long a target may take to answer before it counts as away. The kernel itself waits for keepAlive.
const answerTime = 2 * time.Second

// adminCommand is struct nvme_admin_cmd of include/uapi/linux/nvme_ioctl.h.
type adminCommand struct {
	opcode       uint8
	_            [63]byte
	milliseconds uint32 // how long it may take
	_            uint32
}

const (
	ioctlAdminCommand = 0xC0484E41 // NVME_IOCTL_ADMIN_CMD
	keepAliveCommand  = 0x18
)

// ask sends a keep-alive command to the target of a controller. If no answer comes, the kernel notices that the target is away, and the state is no longer
// live. Otherwise the end of a controller whose target is away takes minutes: nvme_do_delete_ctrl stops the keep-alive first, and then waits for each
// request, for 30 s.
func (c controller) ask() error {
	f, err := c.open()
	if err != nil {
		return err
	}
	defer f.Close()
	command := adminCommand{opcode: keepAliveCommand, milliseconds: uint32(answerTime / time.Millisecond)}
	return ioctl.Pointer(f, ioctlAdminCommand, unsafe.Pointer(&command))
}

// open opens the character device of a controller, and makes its node where no devtmpfs keeps /dev.
func (c controller) open() (*os.File, error) {
	path := "/dev/" + filepath.Base(string(c))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if !errors.Is(err, os.ErrNotExist) {
		return f, err
	}
	number, err := deviceNumber(c.get("dev"))
	if err != nil {
		return nil, err
	}
	if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(number)); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, fmt.Errorf("mknod %s: %w", path, err)
	}
	return os.OpenFile(path, os.O_RDWR, 0)
}
