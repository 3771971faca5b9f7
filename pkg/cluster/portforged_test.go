package cluster_test

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/cluster/port"
	"github.com/ashlar-csi/ashlar/pkg/rpc"
)

// TestPortForged: an attacker sends invented tokens as fast as possible, and the API server is asked about each. That does not keep out a caller with a
// right token.
func TestPortForged(t *testing.T) {
	w, m, s := newPortedCluster(t)
	_, snapshot := w.snapshotOf(s, m, "v", 3)
	ctx, stop := context.WithCancel(w.ctx)
	var forgers sync.WaitGroup
	defer forgers.Wait()
	defer stop()
	var number atomic.Int64
	forged := func(context.Context, bool) (string, error) {
		claims := fmt.Sprintf(`{"aud": [%q], "jti": "%d"}`, port.Audience(nodeName), number.Add(1))
		return "e30." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".e30", nil
	}
	for range 2 {
		c, err := rpc.Dial(m.port.Addr().String(), &tls.Config{InsecureSkipVerify: true}, forged)
		check.OK(t, err)
		t.Cleanup(func() { _ = c.Close() })
		for range 60 {
			forgers.Go(func() {
				for ctx.Err() == nil {
					stream, err := csi.NewSnapshotMetadataClient(c).GetMetadataAllocated(ctx, &csi.GetMetadataAllocatedRequest{SnapshotId: snapshot.ID.String()})
					if err == nil {
						_, err = stream.Recv()
					}
					if err == nil {
						t.Error("a forged token is taken")
					}
				}
			})
		}
	}
	for number.Load() < 200 {
		time.Sleep(10 * time.Millisecond)
	}
	began := time.Now()
	w.eventually("the right token is taken", func() bool { // repeated, as its turn may not come within the time limit
		return m.call(w.ctx, tokenFor(t, "ashlar-controller", port.Audience(nodeName)), snapshot.ID) == nil
	})
	t.Logf("among %d forged tokens the right one took %s", number.Load(), time.Since(began).Round(time.Millisecond))
}
