package disks

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// TestParse: answers about disks of each kind, and answers without any health.
func TestParse(t *testing.T) {
	type counts = map[string]int64
	for file, want := range map[string]Report{
		"ata-well": {Model: "ST4000NM0035-1V4107", Serial: "ZC10AAAA", Told: true, Wear: -1, Errors: counts{Pending: 0, Reallocated: 8, Uncorrectable: 0}},
		"ata-failed": {Model: "ST4000NM0035-1V4107", Serial: "ZC10AAAA", Told: true, Failing: []string{"attribute 5 (Reallocated_Sector_Ct) is at its threshold"}, Wear: -1,
			Errors: counts{Pending: 0, Reallocated: 3904, Uncorrectable: 0}},
		"ata-pending":    {Model: "ST4000NM0035-1V4107", Serial: "ZC10AAAA", Told: true, Wear: -1, Errors: counts{Pending: 16, Reallocated: 8, Uncorrectable: 0}},
		"ata-flash-worn": {Model: "INTEL SSDSC2KB480G8", Serial: "PHYF0000", Told: true, Wear: .93, Errors: counts{Reallocated: 0}},
		"nvme-well":      {Model: "SAMSUNG MZVL2512HCJQ-00B00", Serial: "S675NX00000000", Told: true, Wear: .03, Errors: counts{Uncorrectable: 0}},
		"nvme-warning": {Model: "SAMSUNG MZVL2512HCJQ-00B00", Serial: "S675NX00000000", Told: true, Failing: []string{"it runs out of spare blocks", "it is not reliable any more"}, Wear: 1,
			Errors: counts{Uncorrectable: 31}},
		"nvme-worn":  {Model: "SAMSUNG MZVL2512HCJQ-00B00", Serial: "S675NX00000000", Told: true, Wear: 1.04, Errors: counts{Uncorrectable: 0}},
		"sas":        {Model: "SEAGATE XS960SE70004", Serial: "HLJ00000", Told: true, Wear: .12, Errors: counts{Reallocated: 2, Uncorrectable: 3}},
		"sas-failed": {Model: "SEAGATE ST600MM0006", Serial: "S0M00000", Told: true, Failing: []string{"its overall assessment is FAILED"}, Wear: -1, Errors: counts{}},
		"usb":        {Wear: -1},
		"off":        {Model: "ST4000NM0035-1V4107", Serial: "ZC10AAAA", Wear: -1},
		"standby":    {Wear: -1},
		"qemu-scsi":  {Model: "QEMU QEMU HARDDISK", Wear: -1},
		"virtio":     {Wear: -1},
		// The very answer for QEMU's NVMe, with a critical warning that was set in its monitor (qom-set smart_critical_warning 5).
		"qemu-nvme-warning": {Model: "QEMU NVMe Ctrl", Serial: "ASHLAR01", Told: true, Failing: []string{"it runs out of spare blocks", "it is not reliable any more"}, Wear: 0,
			Errors: counts{Uncorrectable: 0}},
		// The same with other bits.
		"nvme-heat": {Model: "QEMU NVMe Ctrl", Serial: "ASHLAR01", Told: true, Heat: true, Wear: 0, Errors: counts{Uncorrectable: 0}},
	} {
		text, err := os.ReadFile("testdata/" + file + ".json")
		check.OK(t, err)
		have, err := parse(text)
		if err != nil || have.Model != want.Model || have.Serial != want.Serial || have.Told != want.Told || have.Heat != want.Heat || have.Wear != want.Wear ||
			!slices.Equal(have.Failing, want.Failing) || !maps.Equal(have.Errors, want.Errors) {
			t.Errorf("%s: %+v, %v; want %+v", file, have, err, want)
		}
	}
	for _, text := range []string{"", "smartctl 6.6: invalid option", "[]", `{"smart_status": {"passed": false}`} {
		if r, err := parse([]byte(text)); err == nil || r.Told {
			t.Errorf("%q: %+v, %v", text, r, err)
		}
	}
	for _, text := range []string{"{}", `{"smart_status": 1}`, `{"smart_status": {}}`} {
		if r, err := parse([]byte(text)); err != nil || r.Told || len(r.Failing) > 0 {
			t.Errorf("%q: %+v, %v", text, r, err)
		}
	}
}

// TestParseOdd: an impossible value, of a disk that counts wrong, hides nothing of the rest.
func TestParseOdd(t *testing.T) {
	for text, want := range map[string][]string{
		`{"nvme_smart_health_information_log": {"media_errors": 340282366920938463463374607431768211455, "percentage_used": 12, "critical_warning": 4},
			"smart_status": {"passed": false}}`: {"it is not reliable any more"},
		`{"ata_smart_attributes": {"table": [{"id": "5", "raw": 7}, {"id": 5, "name": "Reallocated_Sector_Ct", "when_failed": "now", "flags": {"prefailure": true}}]}}`: {
			"attribute 5 (Reallocated_Sector_Ct) is at its threshold"},
		`{"scsi_grown_defect_list": -1e99, "smart_status": {"passed": false}}`: {"its overall assessment is FAILED"},
	} {
		if r, err := parse([]byte(text)); err != nil || !r.Told || !slices.Equal(r.Failing, want) {
			t.Errorf("%s: %+v, %v; want %q", text, r, err, want)
		}
	}
}

// TestAskHere: smartctl itself, on a device of this machine that has no health.
func TestAskHere(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	device := drivertest.LoopsOver(drivertest.MountNew(t, "ext4", filepath.Join(dir, "disk"), 64<<20))[0]
	for _, name := range []string{device, "no-such-disk"} {
		if r, err := ask(t.Context(), "smartctl", name); err != nil || r.Told {
			t.Errorf("%s: %+v, %v", name, r, err)
		}
	}
	if _, err := ask(t.Context(), "/no/such/smartctl", device); !missing(err) {
		t.Errorf("without smartctl: %v", err)
	}
}
