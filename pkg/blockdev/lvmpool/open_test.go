package lvmpool_test

import (
	"errors"
	"os"
	"strconv"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
)

// TestLVMOpensItsOwn: a device goes away, and its number goes to another one. Open does not return that.
func TestLVMOpensItsOwn(t *testing.T) {
	drivertest.NeedLVM(t)
	name := "ashlar-opens-" + strconv.Itoa(os.Getpid())
	dmsetup(t, "create", name+"-one", "--table", "0 8 error")
	one, err := dm.Find(name + "-one")
	check.OK(t, err)
	f, err := dm.Open(one, os.O_RDONLY)
	check.OK(t, errors.Join(err, f.Close()))
	dmsetup(t, "remove", "--retry", name+"-one")
	for _, other := range []string{"-two", "-one"} { // one of another name, and one of the same name, made anew
		uuid := "other" + other
		dmsetup(t, "create", name+other, "--uuid", uuid, "--table", "0 8 error")
		two, err := dm.Find(name + other)
		check.OK(t, err)
		if two.Number != one.Number {
			t.Errorf("the other one has a number of its own, so this shows nothing")
		}
		if f, err := dm.Open(one, os.O_RDWR); !dm.Vanished(err) {
			_ = f.Close()
			t.Errorf("another device was opened: %v", err)
		}
		dmsetup(t, "remove", "--retry", name+other)
	}
}
