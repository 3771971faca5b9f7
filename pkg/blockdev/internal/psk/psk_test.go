package psk

import (
	"encoding/hex"
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/secret"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// configured is the key of the tests of libnvme (test/psk.c).
const configured = "5512dbb6737d0106f65975b773dfb011ffc344bcf442e2dd6d8bc4870b5d5b03"

func TestSecret(t *testing.T) {
	key, err := hex.DecodeString(configured)
	check.OK(t, err)
	const want = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:" // libnvme: test_data_psk
	if have := Secret(key).Reveal(); have != want {
		t.Errorf("the secret is %s, want %s", have, want)
	}
	check.OK(t, Check(secret.Of(want)))
	for what, text := range map[string]string{
		"none":         "",
		"another sum":  strings.Replace(want, "LrZ", "LrY", 1),
		"another key":  strings.Replace(want, "VRL", "VRM", 1),
		"another hash": strings.Replace(want, ":01:", ":02:", 1),
		"more":         want + ",nqn=x",
		"of DH-CHAP":   strings.Replace(want, "NVMeTLSkey-1:01", "DHHC-1:00", 1),
	} {
		if err := Check(secret.Of(text)); !errors.Is(err, errdefs.ErrInvalid) || strings.Contains(err.Error(), "VRL") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestDerive: as libnvme has it (test_data_identity).
func TestDerive(t *testing.T) {
	key, err := hex.DecodeString(configured)
	check.OK(t, err)
	identity, psk, err := derive(Secret(key), "nqn.psk-test-host", "nqn.psk-test-subsys")
	check.OK(t, err)
	if want := "NVMe1R01 nqn.psk-test-host nqn.psk-test-subsys iSbjiStwJ/1TrTvDlt2fjFmzvsytOJelidNnA+X5lEU="; identity != want {
		t.Errorf("the identity is %q, want %q", identity, want)
	}
	other, otherPSK, err := derive(Secret(key), "nqn.psk-test-host", "nqn.psk-test-subsys2")
	check.OK(t, err)
	if len(psk) != 32 || other == identity || string(otherPSK) == string(psk) {
		t.Errorf("of another subsystem it is %q, %x after %q, %x", other, otherPSK, identity, psk)
	}
}

// TestHandshakes asks this machine's kernel for a family that all kernels have, and for one that none has.
func TestHandshakes(t *testing.T) {
	if n, err := group("nlctrl", "notify"); err != nil || n != unix.GENL_ID_CTRL {
		t.Errorf("the group of nlctrl is %d, %v", n, err)
	}
	if _, err := group("nlctrl", "ashlar"); !errors.Is(err, unix.ENOENT) {
		t.Errorf("a group that there is not: %v", err)
	}
	if _, err := group("ashlar", "tlshd"); !errors.Is(err, unix.ENOENT) {
		t.Errorf("a family that there is not: %v", err)
	}
	const sockets = `sk               Eth Pid        Groups   Rmem     Wmem     Dump  Locks    Drops    Inode
0000000000000000 15  613        00000001 0        0        0     2        0        9221
0000000000000000 16  613        00000001 0        0        0     2        0        9222
0000000000000000 16  0          00000000 0        0        0     2        0        1042
0000000000000000 16  4242       00000010 0        0        0     2        0        23011
`
	for group, want := range map[uint32]bool{1: true, 2: false, 4: false, 5: true, 6: false, 33: true} {
		if have := listens(sockets, group); have != want {
			t.Errorf("somebody listens to group %d: %t", group, have)
		}
	}
}
