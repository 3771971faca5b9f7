package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/overview"
)

// TestShow: the output of the commands for a running driver with a full pool, a pool without its disk, and a damaged volume.
func TestShow(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	small := filepath.Join(dir, "small")
	drivertest.MountNew(t, "ext4", small, 64<<20)
	p := serving(t, dir, "--node-id=n1", "--driver-name=test.example.com", "--pool="+testPool(dir), "--pool=small=file://"+small+"?reservePercent=0&create=1",
		"--pool=gone=lvm://ashlar-no-such-group")
	p.Node = "n1"
	endpoint := "--endpoint=" + p.Socket
	ctx := t.Context()

	well, err := p.Create(ctx, co.Request("well", "", 32<<20))
	check.OK(t, err)
	check.OK(t, well.Claim(ctx))
	check.OK(t, well.Stage(ctx))
	staged := true
	defer func() {
		if staged {
			check.OK(t, well.Unstage(ctx))
		}
	}()
	damaged, err := p.Create(ctx, co.Request("damaged", co.Block, 16<<20))
	check.OK(t, err)
	r := drive(t, "capacity", endpoint, "-o", "json")
	var room struct {
		Pools []struct {
			Pool    string
			Largest int64
		}
	}
	check.OK(t, json.Unmarshal([]byte(r.stdout), &room))
	if len(room.Pools) != 3 || room.Pools[0].Pool != "default" || room.Pools[1].Pool != "gone" || room.Pools[1].Largest != 0 || room.Pools[2].Largest < 16<<20 {
		t.Fatalf("capacity: %+v", room)
	}
	request := co.Request("filling", co.Block, room.Pools[2].Largest)
	request.Parameters = map[string]string{"pool": "small"}
	_, err = p.Create(ctx, request)
	check.OK(t, err)
	images, err := filepath.Glob(dir + "/pool/volumes/*" + strings.TrimPrefix(damaged.ID, "vol.default.") + "*.img")
	if err != nil || len(images) != 1 {
		t.Fatal(images, err)
	}
	check.OK(t, os.Truncate(images[0], 4096))

	r = drive(t, "status", endpoint)
	if r.code != 2 || r.stderr != "" || !strings.HasPrefix(r.stdout, "DataLoss      Volume damaged in pool n1.default\n    ImageTruncated: ") {
		t.Errorf("status ended with %d:\n%s%s", r.code, r.stdout, r.stderr)
	}
	for _, want := range []string{"Pool n1.gone\n    PoolMissing: ", "Pool n1.small\n    PoolFull: ", "See https://", "Volumes    3: 1 lost", "test.example.com " + testVersion} {
		if !strings.Contains(r.stdout, want) {
			t.Errorf("status does not say %q:\n%s", want, r.stdout)
		}
	}
	r = drive(t, "pools", endpoint)
	if lines := strings.Split(r.stdout, "\n"); r.code != 0 || len(lines) != 5 || !strings.Contains(lines[1], "none") || !strings.Contains(lines[2], "PoolMissing") || !strings.Contains(lines[3], "PoolFull") {
		t.Errorf("pools ended with %d:\n%s", r.code, r.stdout)
	}
	r = drive(t, "volumes", endpoint, "--problems", "-o", "json")
	var volumes []overview.Volume
	check.OK(t, json.Unmarshal([]byte(r.stdout), &volumes))
	if len(volumes) != 1 || volumes[0].ID != damaged.ID || volumes[0].State != overview.Lost {
		t.Errorf("volumes --problems: %s", r.stdout)
	}
	r = drive(t, "describe", "well", endpoint)
	if r.code != 0 || !strings.Contains(r.stdout, "Devices            /dev/") || !strings.Contains(r.stdout, "Mounted at         "+dir) || !strings.Contains(r.stdout, "May be used on     n1") {
		t.Errorf("describe ended with %d:\n%s%s", r.code, r.stdout, r.stderr)
	}
	refused(t, drive(t, "describe", "none", endpoint), `no volume "none"`)
	refused(t, drive(t, "status", "--endpoint="+dir+"/other.sock"), "does it run")
	if r := drive(t, "__complete", "describe", endpoint, "we"); !strings.HasPrefix(r.stdout, "well\n") {
		t.Errorf("completed to %s", r.stdout)
	}
	check.OK(t, well.Unstage(ctx))
	staged = false
	stopped(t, p)
}
