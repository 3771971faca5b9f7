//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ashlar-csi/ashlar/internal/check"
)

// slow has a process run for a moment of each second, as if its disk were slow, until it is told to end.
func slow(t *testing.T, pid int) (end func()) {
	t.Helper()
	over, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			_ = syscall.Kill(pid, syscall.SIGSTOP) // it may be gone
			select {
			case <-over:
				_ = syscall.Kill(pid, syscall.SIGCONT)
				return
			case <-time.After(time.Second):
			}
			_ = syscall.Kill(pid, syscall.SIGCONT)
			time.Sleep(15 * time.Millisecond)
		}
	}()
	return func() { close(over); <-ended }
}

// written returns how many bytes a process has written to disks (proc_pid_io(5)).
func written(t *testing.T, pid int) int64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/io", pid))
	check.OK(t, err)
	_, rest, _ := strings.Cut(string(text), "\nwrite_bytes: ")
	line, _, _ := strings.Cut(rest, "\n")
	n, err := strconv.ParseInt(line, 10, 64)
	check.OK(t, err)
	return n
}

// filled makes a raw volume on a node, and writes a block to each MiB of it, as a pod does.
func (p *parts) filled(name, node string, size int64, block []byte) *csi.Volume {
	p.Helper()
	v := p.made(request(name, size, node))
	p.called(codes.OK, publish(p.controller, v.GetVolumeId(), node, writer))
	agent, staging, target := p.agents[node], filepath.Join(p.dir, name+".staging"), filepath.Join(p.dir, name)
	check.OK(p, os.Mkdir(staging, 0o700))
	_, err := agent.NodeStageVolume(p.Context(), &csi.NodeStageVolumeRequest{VolumeId: v.GetVolumeId(), StagingTargetPath: staging, VolumeCapability: writer})
	check.OK(p, err)
	_, err = agent.NodePublishVolume(p.Context(), &csi.NodePublishVolumeRequest{VolumeId: v.GetVolumeId(), StagingTargetPath: staging, TargetPath: target, VolumeCapability: writer})
	check.OK(p, err)
	f, err := os.OpenFile(target, os.O_WRONLY, 0)
	check.OK(p, err)
	for at := int64(0); at < size; at += int64(len(block)) {
		_, err := f.WriteAt(block, at)
		check.OK(p, err)
	}
	check.OK(p, f.Sync())
	check.OK(p, f.Close())
	_, err = agent.NodeUnpublishVolume(p.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: v.GetVolumeId(), TargetPath: target})
	check.OK(p, err)
	_, err = agent.NodeUnstageVolume(p.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: v.GetVolumeId(), StagingTargetPath: staging})
	check.OK(p, err)
	p.called(codes.OK, unpublish(p.controller, v.GetVolumeId()))
	return v
}

// TestLongCopy: a clone that takes minutes is made, though each call for it is given up after one, and nothing of it is
// copied twice.
func TestLongCopy(t *testing.T) {
	const (
		size     = 3 << 30
		timeout  = time.Minute // of the provisioner
		attempts = 3           // for as many calls the copy is slow
	)
	p := start(t)
	block := make([]byte, miB)
	_, err := rand.Read(block)
	check.OK(t, err)
	source := p.filled("source", "node-a", size, block)
	agent := p.agents["node-a"]
	before := written(t, agent.Pid())
	fast := slow(t, agent.Pid())
	defer func() { fast() }()
	clone := request("clone", size)
	clone.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: source.GetVolumeId()}}}
	var made *csi.Volume
	for waited := 0; made == nil; {
		if waited == attempts {
			fast()
			fast = func() {}
		}
		ctx, cancel := context.WithTimeout(t.Context(), timeout)
		answer, err := p.controller.CreateVolume(ctx, clone)
		cancel()
		t.Logf("after %d calls that were given up: %s, %d MiB written", waited, status.Code(err), (written(t, agent.Pid())-before)/miB)
		switch status.Code(err) {
		case codes.OK:
			if made = answer.GetVolume(); waited < attempts {
				t.Fatal("the copy has to be slower for this test")
			}
		case codes.DeadlineExceeded, codes.Unavailable:
			if waited++; waited > 2*attempts {
				t.Fatal(err)
			}
		case codes.Aborted: // the call before it is just ending
			time.Sleep(time.Second)
		default:
			t.Fatal(err)
		}
	}
	if all := written(t, agent.Pid()) - before; all > size+size/4 {
		t.Errorf("%d bytes were written for a copy of %d", all, int64(size))
	}
	id := made.GetVolumeId()
	f, err := os.Open(filepath.Join(p.dir, "node-a/pool/volumes", id[strings.LastIndexByte(id, '.')+1:]+".img"))
	check.OK(t, err)
	defer f.Close()
	have := make([]byte, len(block))
	for at := int64(0); at < size; at += int64(len(block)) {
		if _, err := io.ReadFull(f, have); err != nil || !bytes.Equal(have, block) {
			t.Fatalf("at %d the copy differs: %v", at, err)
		}
	}
	p.called(codes.OK, remove(p.controller, id))
	p.called(codes.OK, remove(p.controller, source.GetVolumeId()))
	p.agree(map[string]string{})
}
