package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"time"

	"github.com/ashlar-csi/ashlar/tests/figures"
)

// How often a driver that is observed is asked for its metrics, and how long it is watched at rest.
const (
	scrapeEvery = time.Second
	restFor     = 30 * time.Second
)

// observed compares whole lives of a volume by a driver that shows all that it can, and is asked for it all the time, with those by one
// that shows nothing.
func (b *bench) observed(ctx context.Context) (err error) {
	addresses, err := freeAddresses()
	if err != nil {
		return err
	}
	start := func(name string, flags ...string) (*driver, error) {
		dir := filepath.Join(b.dir, name)
		return b.startOn(ctx, dir, "file://"+dir+"/pool?reservePercent=0", flags...)
	}
	seen, err := start("seen", "--metrics-endpoint="+addresses[0], "--metrics-per-volume", "--page="+addresses[1])
	if err != nil {
		return err
	}
	defer seen.stop()
	unseen, err := start("unseen")
	if err != nil {
		return err
	}
	defer unseen.stop()
	stop := scrape(ctx, "http://"+addresses[0]+"/metrics")
	defer func() { err = errors.Join(err, stop()) }()
	both := [2]*driver{seen, unseen}
	fmt.Printf("\n## Being observed\n\nLives as above, by a driver with metrics (of each volume, too, read every %s) and the page, and by one without, in turn.\nMedian (p10..p90).\n", scrapeEvery)
	var rows [][]string
	for _, atOnce := range []int{1, 4} {
		progress("observed: %d at once", atOnce)
		rates, err := b.inTurn(atOnce, b.lived(ctx, seen, atOnce, &recorder{}), b.lived(ctx, unseen, atOnce, &recorder{}))
		if err != nil {
			return err
		}
		rows = append(rows, []string{fmt.Sprint(atOnce), fmt.Sprint(b.rounds * b.lives * atOnce), spreadOf("%.1f", rates[0]), spreadOf("%.1f", rates[1]), spreadOf("%.2f", ratios(rates[0], rates[1]))})
	}
	figures.Table([]string{"at once", "lives", "observed, lives/s", "not, lives/s", "observed / not"}, rows)

	before := [2]usage{both[0].usage(), both[1].usage()}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(restFor):
	}
	fmt.Printf("\nThe same two processes afterwards, with nothing to do for %s:\n", restFor)
	rows = nil
	for i, name := range []string{"observed", "not"} {
		now := both[i].usage()
		rows = append(rows, []string{name, fmt.Sprintf("%.0f", float64(now.rss)/1024), ms((now.cpu - before[i].cpu) * (time.Minute / restFor))})
	}
	figures.Table([]string{"", "RSS, MiB", "processor time, ms per minute"}, rows)
	return nil
}

// scrape reads an address again and again until what it returns is called, which returns why it could not be read.
func scrape(ctx context.Context, address string) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	failed := make(chan error)
	go func() {
		var err error
		for ctx.Err() == nil && err == nil {
			err = get(ctx, address)
			select {
			case <-ctx.Done():
				err = nil // it was cut short
			case <-time.After(scrapeEvery):
			}
		}
		failed <- err
	}()
	return func() error {
		cancel()
		return <-failed
	}
}

func get(ctx context.Context, address string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", address, answer.Status)
	}
	_, err = io.Copy(io.Discard, answer.Body)
	return err
}

// freeAddresses are two of this machine that nobody listens at.
func freeAddresses() (two [2]string, err error) {
	var held [2]net.Listener
	for i := range two {
		if held[i], err = net.Listen("tcp", "localhost:0"); err != nil {
			return two, err
		}
		two[i] = held[i].Addr().String()
	}
	return two, errors.Join(held[0].Close(), held[1].Close())
}
